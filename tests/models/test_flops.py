from typing import Any, Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fivefold.models.flops import flops_per_token, keys_seen
from fivefold.models.inventory import parameters
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput
from tests.models.zoo import built, small


def test_llama3_8b_by_both_conventions():
    llama = PRESETS["llama3-8b"]
    assert flops_per_token(llama, 8192, "full").model == pytest.approx(57.91e9, abs=5e6)
    assert flops_per_token(llama, 8192, "causal").model == pytest.approx(51.47e9, abs=5e6)


def test_a_measured_run_gives_its_known_utilisation():
    spec = small(vocab_size=128_256, dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, max_seq_len=8192)
    mfu = 53_074 * flops_per_token(spec, 8192, "causal").model / 989.4e12
    assert round(mfu, 3) == 0.484


WITH_SHARED_EXPERTS = small(experts=4, experts_per_token=2, shared_experts=2)
RELEASED = ("tiny", "gpt2", "llama3-70b", "palm-540b", "mixtral-8x7b", "gemma2-27b")


@pytest.mark.parametrize("spec", [*(PRESETS[name] for name in RELEASED), WITH_SHARED_EXPERTS])
def test_six_operations_for_every_matrix_weight_that_a_token_meets(spec: ModelSpec):
    met = 0.0
    for parameter in parameters(spec):
        if parameter.part == "embedding" or len(parameter.shape) < 2 or parameter.name.endswith("bias"):
            continue
        expert = ".experts." in parameter.name
        met += parameter.count * ((spec.experts_per_token or 1) / (spec.experts or 1) if expert else 1)
    met += spec.vocab_size * spec.dim if spec.tied else 0
    flops = flops_per_token(spec, 1)
    assert 3 * (flops.blocks + flops.head) == 6 * met


@pytest.mark.parametrize("fields", [{}, {"activation": "gelu", "kv_heads": 1, "tied": True, "head_dim": 8}])
def test_torch_counts_the_same_operations(fields: dict[str, Any]):
    """Counted on the plain kernel, which compares every query with every key."""
    spec = small(**fields)
    model = built(spec, dtype=torch.float32)
    tokens = torch.randint(0, spec.vocab_size, (2, 16))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(tokens, tokens)
        forward = counter.get_total_flops()
        loss.backward()
    flops = flops_per_token(spec, 16, "full")
    assert forward == 2 * 16 * flops.forward
    assert counter.get_total_flops() == 2 * 16 * flops.model


def test_keys_seen_through_a_window():
    def attention(window: int | None, convention: Literal["causal", "full"]) -> float:
        return flops_per_token(small(sliding_window=window), 1000, convention).attention / (4 * 2 * 24)

    assert attention(None, "full") == 1000
    assert attention(None, "causal") == 500
    assert attention(100, "full") == 100
    assert attention(100, "causal") == 95
    assert attention(1000, "causal") == attention(4000, "causal") == 500


def test_layers_without_a_window_see_everything():
    spec = small(layers=7, sliding_window=100, full_attention_every=3)
    assert [spec.window(layer) for layer in range(7)] == [100, 100, None, 100, 100, None, 100]
    assert keys_seen(spec, 1000, "full") == pytest.approx((5 * 100 + 2 * 1000) / 7)
    assert keys_seen(spec, 1000) == pytest.approx((5 * 95 + 2 * 500) / 7)


def test_recomputation_adds_a_forward_of_the_blocks_and_not_of_the_head():
    flops = flops_per_token(PRESETS["llama3-8b"], 8192)
    assert flops.hardware("none") == flops.hardware("selective") == flops.model
    for mode in ("full", "sqrt", "every-2", "every-12"):
        assert flops.hardware(mode) - flops.model == flops.forward - flops.head
    for unknown in ("every-0", "every", "every-2x", "some"):
        with pytest.raises(BadInput, match=r"training\.recompute: '.*' is not known"):
            flops.hardware(unknown)
