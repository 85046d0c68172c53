"""Simulated campaigns against the formulas, against published runs, and against common sense."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.planner import goodput
from fivefold.planner.goodput import (
    FAILURES_PER_GPU_HOUR,
    LLAMA3_GPU_HOURS,
    LLAMA3_INTERRUPTIONS,
    Campaign,
    best_interval,
    checkpoint_seconds,
    daly_goodput,
    daly_interval,
    play,
    simulate_run,
    young_interval,
)
from fivefold.problems import BadInput
from fivefold.report.simulated_job import run_text

HOUR = 3600.0


def campaign(between: float, checkpoint: float, restart: float, work: float = 200.0, step: float = 1.0):
    """One GPU that fails every `between` seconds, for as much work as `work` times that; a known rate."""
    return Campaign(
        step_time=step,
        steps=round(work * between / step),
        gpus=1,
        failures_per_gpu_hour=HOUR / between,
        checkpoint_seconds=checkpoint,
        restart_seconds=restart,
        rate_spread=0.0,
    )


# --- against the formulas ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "checkpoint", "restart"),
    [
        (300, 5, 0),
        (300, 5, 600),
        (100, 5, 600),
        (2000, 5, 600),
        (1000, 60, 0),
        (3000, 1000, 2000),
        (50, 0, 10),
        (300, 5, 20_000),
    ],
)
def test_simulated_goodput_is_daly_s_expectation(interval, checkpoint, restart):
    case = campaign(10_000, checkpoint, restart)
    seconds = play(case, interval, runs=1000).seconds
    expected = daly_goodput(interval, checkpoint, restart, 10_000)
    assert case.work / seconds.mean() == pytest.approx(expected, rel=0.004)


@pytest.mark.parametrize("checkpoint", [1, 5, 60])
@pytest.mark.parametrize("restart", [0, 600])
def test_the_interval_found_is_young_and_daly_s_where_checkpoints_are_short(checkpoint, restart):
    case = campaign(10_000, checkpoint, restart)
    found = best_interval(case) * case.step_time
    assert found == pytest.approx(daly_interval(checkpoint, 10_000), rel=0.15)
    assert found == pytest.approx(young_interval(checkpoint, 10_000), rel=0.2)
    best = daly_goodput(daly_interval(checkpoint, 10_000), checkpoint, restart, 10_000)
    assert daly_goodput(found, checkpoint, restart, 10_000) == pytest.approx(best, abs=5e-4)


def steps_done(case, interval, gaps):
    """Steps that last, from one failure to the next: the run restarts, and saves every `interval` steps."""
    done = 0
    for gap in gaps:
        left = gap - case.restart_seconds
        while (left := left - interval * case.step_time - case.checkpoint_seconds) >= 0:
            done += interval
    return done


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_no_interval_does_more_between_the_failures_that_it_was_chosen_for(seed, monkeypatch):
    """Most come while the run still restarts. Few are drawn: what comes after a restart is memoryless, so
    that of many failures the best interval would be the same without any.
    """
    monkeypatch.setattr(goodput, "SEARCHED_FAILURES", 300)
    case = campaign(1000, 20, 3000)
    gaps = np.random.default_rng(seed).exponential(1000, 300)
    chosen = steps_done(case, best_interval(case, seed), gaps)
    assert chosen >= 0.975 * max(steps_done(case, interval, gaps) for interval in range(40, 800, 7))


def test_young_s_interval_is_too_long_where_checkpoints_take_as_long_as_failures_come():
    """His derivation assumes that a failure hardly ever falls into a checkpoint; Daly's does not."""
    between = checkpoint = 1000.0
    found = best_interval(campaign(between, checkpoint, 0))
    assert young_interval(checkpoint, between) > 1.5 * found
    assert daly_interval(checkpoint, between) == pytest.approx(found, rel=0.15)


def test_daly_s_interval_has_a_ceiling():
    assert daly_interval(5000, 1000) == 1000


@settings(deadline=None)
@given(checkpoint=st.floats(0.1, 500), between=st.floats(1000, 1e6), restart=st.floats(0, 1000))
def test_no_interval_beats_daly_s_by_much(checkpoint, between, restart):
    best = daly_goodput(daly_interval(checkpoint, between), checkpoint, restart, between)
    for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
        other = daly_goodput(factor * daly_interval(checkpoint, between), checkpoint, restart, between)
        assert other <= best * 1.0005


def test_a_formula_of_the_hopeless_is_nothing_and_does_not_overflow():
    assert daly_goodput(1e6, 10, 10, 1.0) == 0.0


# --- against published runs --------------------------------------------------------------------------------


def test_the_default_rate_is_llama_3_s():
    assert pytest.approx(466 / (54 * 24 * 16_384)) == FAILURES_PER_GPU_HOUR
    assert LLAMA3_INTERRUPTIONS - 47 == 419  # 47 were planned
    hours_a_failure = LLAMA3_GPU_HOURS / 419
    assert hours_a_failure == pytest.approx(50_700, rel=1e-3)
    assert Campaign(1, 1, 16_384).seconds_between_failures == pytest.approx(2.78 * HOUR, rel=1e-3)


def test_llama_3_had_more_than_nine_tenths_of_its_time():
    """54 days at 16,384 GPUs; the paper says "higher than 90%" and 466 interruptions."""
    case = Campaign(
        6.0, round(54 * 86_400 * 0.92 / 6.0), 16_384, checkpoint_seconds=checkpoint_seconds(405e9, 16_384)
    )
    outcome = simulate_run(case)
    assert 0.90 < outcome.goodput < 0.93
    assert outcome.days_p50 == pytest.approx(54, rel=0.02)
    assert outcome.failures_p50 == pytest.approx(466, rel=0.05)


def test_restarts_dominate_at_16_thousand_gpus():
    """Unexpected failures alone, 5 s a checkpoint, 10 minutes to recover: first-order arithmetic."""
    between = LLAMA3_GPU_HOURS / 419 / 16_384 * HOUR
    interval = young_interval(5, between)
    assert between == pytest.approx(3.09 * HOUR, rel=2e-3)
    assert interval == pytest.approx(333, abs=1)
    saved_and_lost, recovering = 5 / interval + interval / 2 / between, 600 / between
    assert saved_and_lost == pytest.approx(0.030, abs=5e-4)
    assert recovering == pytest.approx(0.054, abs=5e-4)
    assert 1 - saved_and_lost - recovering == pytest.approx(0.916, abs=5e-4)
    assert daly_goodput(interval, 5, 600, between) == pytest.approx(0.916, abs=4e-3)


def test_checkpoints_take_as_long_as_bloom_s():
    bytes_a_parameter = 2.3e12 / 176e9
    assert bytes_a_parameter == pytest.approx(13.07, abs=0.01)
    assert checkpoint_seconds(176e9, 384) == pytest.approx(
        79, abs=1
    )  # by default twice as long: Llama 3's storage
    assert checkpoint_seconds(405e9, 16_384) == pytest.approx(4.25, abs=0.01)


# --- common sense ------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    step=st.floats(0.1, 60),
    steps=st.integers(1, 5000),
    gpus=st.integers(1, 20_000),
    checkpoint=st.floats(0, 300),
    restart=st.floats(0, 1200),
    spread=st.floats(0, 0.3),
)
def test_every_second_is_accounted_for(step, steps, gpus, checkpoint, restart, spread):
    case = Campaign(step, steps, gpus, FAILURES_PER_GPU_HOUR, checkpoint, restart, 2.0, spread)
    outcome = simulate_run(case, runs=50)
    assert 1 <= outcome.interval_steps <= steps
    assert 0 < outcome.goodput <= 1
    assert outcome.goodput + outcome.checkpoints + outcome.restarts + outcome.repeated == pytest.approx(1)
    assert outcome.days_without_failures <= outcome.days_p50 * (1 + 1e-9)
    assert outcome.days_p50 <= outcome.days_p90
    assert outcome.cost_p90 == pytest.approx(outcome.days_p90 * 24 * gpus * 2.0)


def test_without_failures_a_run_saves_once_and_takes_its_time():
    outcome = simulate_run(replace(campaign(1000, 60, 600), failures_per_gpu_hour=0.0))
    assert outcome.interval_steps == 200_000
    assert outcome.goodput == pytest.approx(200_000 / 200_060)
    assert outcome.days_p50 == outcome.days_p90 == pytest.approx(200_060 / 86_400)
    assert (outcome.failures_p50, outcome.seconds_between_failures, outcome.young_daly_goodput) == (
        0,
        None,
        None,
    )


@pytest.mark.parametrize("rate", [0.0, 1e-9])
def test_a_shorter_last_interval_is_shorter(rate):
    case = replace(campaign(1000, 10, 0), steps=25, failures_per_gpu_hour=rate)
    assert play(case, 10, runs=1).seconds[0] == pytest.approx(25 + 3 * 10)


def test_free_checkpoints_are_written_every_step():
    assert best_interval(campaign(1000, 0, 0)) == 1


def test_the_first_start_is_not_a_restart():
    """A run of a few seconds that fails once a year takes those seconds."""
    case = replace(campaign(3e7, 1, 600), steps=10)
    assert play(case, 10, runs=100).seconds == pytest.approx(np.full(100, 11.0))


@pytest.mark.parametrize("restart", [500, 2000])
def test_a_restart_that_fails_has_taken_until_then(restart):
    """Of failures that come every 1,000 s a restart sees 1,000 (1 - exp(-restart / 1,000)) s, on average."""
    played = play(campaign(1000, 1, restart), 20, runs=200)
    each = played.restarting.sum() / played.failures.sum()
    assert each == pytest.approx(1000 * -math.expm1(-restart / 1000), rel=0.01)


def test_more_gpus_fail_more_often_and_lose_more():
    few, many = (simulate_run(Campaign(5.0, 100_000, gpus, checkpoint_seconds=10)) for gpus in (1024, 16_384))
    assert many.failures_p50 > 10 * few.failures_p50
    assert many.goodput < few.goodput - 0.05
    assert many.interval_seconds == pytest.approx(few.interval_seconds / 4, rel=0.2)


def test_an_uncertain_rate_widens_what_may_happen():
    known = Campaign(5.0, 500_000, 16_384, rate_spread=0.0)
    certain, uncertain = simulate_run(known), simulate_run(replace(known, rate_spread=0.5))
    assert uncertain.days_p90 - uncertain.days_p50 > 3 * (certain.days_p90 - certain.days_p50)


def test_the_same_seed_gives_the_same_outcome():
    case = Campaign(5.0, 100_000, 16_384)
    assert simulate_run(case) == simulate_run(case)
    assert simulate_run(case, seed=1) != simulate_run(case)
    assert simulate_run(case, seed=1).goodput == pytest.approx(simulate_run(case).goodput, abs=0.005)


# --- bad input and words -----------------------------------------------------------------------------------


def test_everything_wrong_with_a_campaign_is_said_at_once():
    with pytest.raises(BadInput) as caught:
        Campaign(0.0, 0, -1, checkpoint_seconds=-1, restart_seconds=math.inf, price=-2)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["step_time", "steps", "gpus", "checkpoint_seconds", "restart_seconds", "price"]


def test_what_is_no_number_is_refused():
    for wrong in ({"failures_per_gpu_hour": math.nan}, {"price": math.nan}, {"rate_spread": math.nan}):
        with pytest.raises(BadInput, match=next(iter(wrong))):
            Campaign(1.0, 1, 1, **wrong)


def test_a_machine_that_fails_before_it_has_restarted_is_refused():
    with pytest.raises(BadInput, match=r"10,000,000 GPUs fail every 16 s: .*\s+Take fewer GPUs"):
        simulate_run(Campaign(5.0, 1000, 10_000_000))


def test_the_report_says_what_to_do():
    case = Campaign(6.0, 800_000, 16_384, checkpoint_seconds=4.25, price=2.5)
    outcome = simulate_run(case)
    text = run_text(case, outcome)
    for words in ("goodput", "checkpoint every", "steps", "by Young, Daly"):
        assert words in text
    assert outcome.cost_p50 is not None
    assert outcome.cost_p90 is not None
    assert outcome.cost_p90 > outcome.cost_p50
    assert f"${outcome.cost_p50:,.0f}, and ${outcome.cost_p90:,.0f}" in text
    never = replace(case, failures_per_gpu_hour=0.0, price=None)
    assert "$" not in run_text(never, simulate_run(never))
