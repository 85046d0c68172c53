import subprocess
import sys

import pytest

from fivefold.models.inventory import parameter_count
from fivefold.models.presets import PRESETS

RELEASED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mixtral-8x7b": 46_702_792_704,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
}
PUBLISHED_IN_BILLIONS = {
    "tiny": 0.00126,
    "tiny-moe": 0.00363,
    "gpt3-175b": 174.6,
    "mt-nlg-530b": 529.6,
    "megatron-1t": 1008.0,
    "palm-540b": 540.35,
    "gpt4-estimate": 1830,
}


def test_every_preset_has_a_count_to_be_checked_against():
    assert set(RELEASED) | set(PUBLISHED_IN_BILLIONS) == set(PRESETS)
    assert all(name == spec.name for name, spec in PRESETS.items())


@pytest.mark.parametrize("name", RELEASED)
def test_counts_are_exact_where_weights_were_released(name: str):
    assert parameter_count(PRESETS[name]) == RELEASED[name]


@pytest.mark.parametrize("name", PUBLISHED_IN_BILLIONS)
def test_counts_agree_with_what_was_published(name: str):
    assert parameter_count(PRESETS[name]) / 1e9 == pytest.approx(PUBLISHED_IN_BILLIONS[name], rel=4e-3)


def test_tiny_splits_by_two_and_by_four():
    tiny = PRESETS["tiny"]
    assert tiny.layers >= 8
    for size in (tiny.layers, tiny.heads, tiny.kv_heads, tiny.ffn, tiny.vocab_size, tiny.dim):
        assert size % 4 == 0


def test_reading_about_models_needs_no_torch():
    code = """
import sys
import fivefold.models.flops, fivefold.models.huggingface, fivefold.models.inventory, fivefold.models.presets
sys.exit(", ".join({"torch", "numpy", "pyarrow"} & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
