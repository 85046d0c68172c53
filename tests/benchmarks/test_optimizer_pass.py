"""The benchmark of update and norm runs, and knows which bytes they read and write."""

import pytest

from benchmarks.optimizer_pass import bytes_each, main
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.planner.time.state import our_optimizer_bytes


def test_it_runs_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--small", "--repeats", "1"])
    printed = capsys.readouterr().out
    for gradients, states, size in (
        ("bfloat16", "fp32", 30),
        ("float32", "fp32", 34),
        ("bfloat16", "bf16", 22),
        ("float32", "bf16", 26),
    ):
        assert f"| {gradients} | {states} | {size} |" in printed


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize(("gradients", "micro_batches"), [("bfloat16", 1), ("float32", 2)])
def test_its_bytes_are_the_planners(states: str, gradients: str, micro_batches: int) -> None:
    setup = Setup(PRESETS["llama3-8b"], 8192, micro_batches, PRECISIONS["bf16"], states=states)
    assert bytes_each(gradients, states) == our_optimizer_bytes(setup)
