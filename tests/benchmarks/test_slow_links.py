"""Two hosts joined by a limited link, for real: it limits steps, and the ledger's bytes go over it."""

import pytest

from benchmarks.hosts import NoHostsError, hosts
from benchmarks.link_case import Case, run_case
from benchmarks.link_prediction import bytes_a_step, step_seconds
from benchmarks.links import bytes_per_second
from benchmarks.slow_links import CASES, COMMON, RATIOS

RATE = "20mbit"
SMALL = {
    "model.layers": 2,
    "model.dim": 64,
    "model.ffn": 256,
    "training.global_batch": 4,
    "training.seq_len": 16,
    "training.validate_batches": 1,
    "data.source": "random",
}


@pytest.fixture(scope="module")
def _slow_hosts_can_be_made():
    try:
        with hosts(1, RATE):
            pass
    except NoHostsError as error:
        pytest.skip(f"no hosts with limited links can be made here: {error}")


@pytest.mark.slow
@pytest.mark.usefixtures("_slow_hosts_can_be_made")
@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, 1),
        ({"communication.compress": "int8"}, 1),
        ({"layout.zero": 3, "layout.dp_replicate": 2}, 2),
    ],
    ids=["fp32", "int8", "hsdp"],
)
def test_a_limited_link_limits_steps_and_carries_the_ledgers_bytes(tmp_path, settings, ranks):
    common = {**COMMON, **SMALL}
    slow, fast = (
        Case(name, settings, 12, ranks, slow=name == "slow", validated=True) for name in ("slow", "fast")
    )
    outcomes = {case.name: run_case(case, common, RATE, tmp_path) for case in (fast, slow)}
    by_ledger = bytes_a_step(slow.job(common), ranks)
    for outcome in outcomes.values():  # headers of packets and what is sent at the start come on top
        assert by_ledger < outcome.sent < 1.1 * by_ledger
    assert outcomes["slow"].held_out == outcomes["fast"].held_out
    # Faster than the link no step can be, but for what a rest lets through at once.
    alone = step_seconds(slow.job(common), ranks, 0.0, bytes_per_second(RATE))
    assert outcomes["slow"].step_s > 0.8 * alone


def test_every_ratio_is_of_cases_that_there_are():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for ratio in RATIOS:
        assert {ratio.case, ratio.over, ratio.same_loss or ratio.case} <= set(names)
    for place, case in enumerate(CASES):
        assert not case.compute or case.compute in names[:place]
        assert case.job(COMMON).training.steps == case.steps  # its settings go together
