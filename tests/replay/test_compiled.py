"""What compiled parts keep, by the ledger; `tests/gpu/test_compiled.py` holds it to a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fivefold.config import load, resolve
from fivefold.hardware.cluster import find_cluster
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.planner.memory.fullest_rank import memory
from fivefold.planner.memory.known_activations import activations
from fivefold.replay.activations import Activations

EAGER = Setup(PRESETS["llama3-8b"], 8192, 8, PRECISIONS["bf16"])
COMPILED = replace(EAGER, compile=True)
GIB = 2**30


def block(setup: Setup) -> Activations:
    return activations("block", setup, "cuda")


def head(setup: Setup) -> Activations:
    return activations("head", setup, "cuda")


def test_a_compiled_block_keeps_all_but_the_result_of_silu() -> None:
    eager, compiled = block(EAGER), block(COMPILED)
    assert eager.saved - compiled.saved == 8192 * EAGER.spec.ffn * 2
    assert compiled.forward_peak < eager.forward_peak
    assert compiled.backward_peak < eager.backward_peak


def test_a_compiled_loss_has_one_copy_of_the_logits() -> None:
    eager, compiled = head(EAGER), head(COMPILED)
    logits = 8192 * EAGER.spec.vocab_size
    assert eager.saved - compiled.saved == 2 * logits
    assert compiled.saved + compiled.backward_peak < 4 * logits < eager.saved + eager.backward_peak


def in_one_piece(found: Activations) -> Activations:
    """A compiled backward is never cut in two."""
    return replace(found, half_done=0.0, half_peak=0.0)


@pytest.mark.parametrize("changes", [{"recompute": "full"}, {"spec": PRESETS["mixtral-8x7b"]}])
def test_what_is_left_as_it_runs_eagerly(changes: dict[str, object]) -> None:
    eager, compiled = (replace(setup, **changes) for setup in (EAGER, COMPILED))  # type: ignore[arg-type]
    assert in_one_piece(block(eager)) == in_one_piece(block(compiled))


def test_heads_split_over_tp_are_left_as_they_are_and_many_layouts_may_differ() -> None:
    split = np.array([1, 2])
    found = head(replace(COMPILED, tp=split))
    for place, tp in enumerate((1, 2)):
        alone = head(replace(COMPILED, tp=tp))
        assert np.asarray(found.saved)[place] == alone.saved
    eager, compiled = (head(replace(setup, tp=2)) for setup in (EAGER, COMPILED))
    assert in_one_piece(eager) == in_one_piece(compiled)


@pytest.mark.parametrize(("batch", "measured"), [(2, 43.67), (4, 67.2)])
def test_a_compiled_job_takes_what_it_took(batch: int, measured: float) -> None:
    """GiB allocated at most by the job of the benchmarks on an H200 (benchmarks/README.md)."""
    job = load("benchmarks/h200_1b.toml", None, [f"--training.global_batch={batch}"])
    needed = memory(Setup.of(resolve(job, 1, "cuda")), find_cluster("dgx-h200"))
    assert float(needed.allocated) / GIB == pytest.approx(measured, rel=0.01)
