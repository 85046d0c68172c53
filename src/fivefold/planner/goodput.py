"""A whole training: what failures, checkpoints and restarts leave of the time that is paid for.

A run computes, writes a checkpoint every so many steps, and waits while it does. Failures come at random, at
a rate that grows with the number of GPUs. Each costs a restart and the work since the last checkpoint; one
that comes while a checkpoint is written, or while the run restarts, is a failure like any other.

Failures are drawn, runs are played through (`simulate_run`), and the interval between checkpoints is the one
that loses least on a long row of drawn failures. Young's and Daly's formulas stand beside it as a check.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.problems import BadInput, Problem, refuse

Array = npt.NDArray[np.float64]
HOUR = 3600.0
DAY = 24 * HOUR
LLAMA3_GPU_HOURS = 54 * 24 * 16_384
LLAMA3_INTERRUPTIONS = 466
"""Llama 3 405B, arXiv:2407.21783, section 3.3.4: 54 days on 16,384 GPUs, 47 of 466 interruptions planned."""
FAILURES_PER_GPU_HOUR = LLAMA3_INTERRUPTIONS / LLAMA3_GPU_HOURS
"""Planned interruptions too: each is taken to lose work, though one can save first."""
RATE_SPREAD = 0.25
"""How well a rate is known: the standard deviation of its logarithm. Llama 3 has an unexpected failure every
50.7 thousand GPU-hours, BLOOM (a GPU a week out of 384) every 64.5 thousand: they differ by e^0.24."""
RESTART_SECONDS = 600.0
"""MegaScale, arXiv:2402.15627: found, diagnosed and taken out in less than 10 minutes."""
CHECKPOINT_SECONDS = 40.0
"""BLOOM's 2.3 TB, on 384 GPUs. Where the model is known, `checkpoint_seconds` says it better."""
STATE_BYTES_PER_PARAMETER = 14
"""Weights in 16 bits; master weights and two moments in 32. BLOOM's 2.3 TB are 13 a parameter."""
STORAGE_BYTES_PER_SECOND_PER_GPU = 2e12 / 24_576
"""Llama 3's storage writes 2 TB/s, for a cluster of 24,576 GPUs: 81 MB/s each. BLOOM's did 150."""

SEARCHED_FAILURES = 40_000
SIMULATED_RUNS = 1000
_BLOCK = 64
STANDSTILL = 0.1
"""A campaign is refused when failures leave less than this part of its goodput: it would get nowhere."""


@dataclass(frozen=True)
class Campaign:
    """One training, from the first step to the last.

    step_time           seconds
    checkpoint_seconds  how long training waits for a checkpoint
    restart_seconds     from a failure until the first step after it
    price               dollars for an hour of one GPU; None when costs are not asked for
    rate_spread         how uncertain the failure rate is: the standard deviation of its logarithm
    """

    step_time: float
    steps: int
    gpus: int
    failures_per_gpu_hour: float = FAILURES_PER_GPU_HOUR
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    restart_seconds: float = RESTART_SECONDS
    price: float | None = None
    rate_spread: float = RATE_SPREAD

    def __post_init__(self) -> None:
        positive = {"step_time", "steps", "gpus"}
        problems = []
        for name, value in vars(self).items():
            enough = value > 0 if name in positive else value is None or value >= 0
            if not enough or value == math.inf:
                least = "above 0" if name in positive else "0 or more"
                problems.append(Problem(name, f"{value} is out of range", f"It must be {least}."))
        refuse(problems)

    @property
    def work(self) -> float:
        """Seconds it takes when nothing fails and nothing is saved."""
        return self.step_time * self.steps

    @property
    def seconds_between_failures(self) -> float:
        """Mean time between failures of the whole machine."""
        rate = self.failures_per_gpu_hour * self.gpus / HOUR
        return 1 / rate if rate else math.inf


@dataclass(frozen=True)
class Outcome:
    """How a campaign goes. P50 and P90: half, and nine in ten, of the simulated runs need no more.

    goodput              seconds of steps that lasted, over all seconds until the end
    interval_steps       steps between checkpoints that lose least; `interval_seconds` of steps
    checkpoints, restarts, repeated  where the rest of the time goes: fractions that add to 1 with `goodput`
    young_daly_interval  Daly's higher-order estimate of the best interval
    young_daly_goodput   Daly's expected goodput at that interval, for a run without end
    """

    goodput: float
    interval_steps: int
    interval_seconds: float
    checkpoints: float
    restarts: float
    repeated: float
    days_without_failures: float
    days_p50: float
    days_p90: float
    cost_p50: float | None
    cost_p90: float | None
    failures_p50: float
    seconds_between_failures: float | None
    young_interval: float | None
    young_daly_interval: float | None
    young_daly_goodput: float | None
    runs: int


class Played(NamedTuple):
    """Simulated runs: how long each took, how often it failed, and how long it spent restarting."""

    seconds: Array
    failures: Array
    restarting: Array


def checkpoint_seconds(parameters: float, gpus: int) -> float:
    """How long it takes to write a model's state, to storage that grows with the machine."""
    return parameters * STATE_BYTES_PER_PARAMETER / (gpus * STORAGE_BYTES_PER_SECOND_PER_GPU)


def young_interval(checkpoint: float, between_failures: float) -> float:
    """Young 1974: the interval at which writing costs as much as is lost, to first order."""
    return math.sqrt(2 * checkpoint * between_failures)


def daly_interval(checkpoint: float, between_failures: float) -> float:
    """Daly 2006: the higher-order estimate, in seconds of work between checkpoints."""
    if checkpoint >= 2 * between_failures:
        return between_failures
    ratio = math.sqrt(checkpoint / (2 * between_failures))
    return young_interval(checkpoint, between_failures) * (1 + ratio / 3 + ratio**2 / 9) - checkpoint


def daly_goodput(interval: float, checkpoint: float, restart: float, between_failures: float) -> float:
    """Daly 2006: work over expected time, when failures are memoryless and may interrupt a restart too."""
    if math.isinf(between_failures):
        return interval / (interval + checkpoint)
    segment = interval + checkpoint
    lasting = math.exp(-(restart + segment) / between_failures) / -math.expm1(-segment / between_failures)
    return interval / between_failures * lasting


def simulate_run(campaign: Campaign, runs: int = SIMULATED_RUNS, seed: int = 0) -> Outcome:
    """Play the campaign `runs` times, with checkpoints as far apart as loses least. Raises `BadInput`."""
    between, restart = campaign.seconds_between_failures, campaign.restart_seconds
    checkpoint, interval = campaign.checkpoint_seconds, best_interval(campaign, seed)
    segment = interval * campaign.step_time
    useful = daly_goodput(segment, checkpoint, restart, between)
    if useful < STANDSTILL * (segment / (segment + checkpoint)):
        message = (
            f"{campaign.gpus:,} GPUs fail every {between:,.0f} s: with {restart:,.0f} s to restart "
            f"and {checkpoint:,.0f} s to save, {useful:.1%} of the time would be of use"
        )
        hint = "Take fewer GPUs, a shorter restart or faster checkpoints."
        raise BadInput([Problem("failures_per_gpu_hour", message, hint)])
    played = play(campaign, interval, runs, seed)
    total, restarting = float(played.seconds.mean()), float(played.restarting.mean())
    saving = math.ceil(campaign.steps / interval) * checkpoint
    half, most = (float(days) for days in np.quantile(played.seconds, [0.5, 0.9]) / DAY)
    a_day = None if campaign.price is None else campaign.price * campaign.gpus * 24
    young = daly = expected = None  # where nothing fails or saving is free
    if checkpoint and not math.isinf(between):
        young, daly = young_interval(checkpoint, between), daly_interval(checkpoint, between)
        expected = daly_goodput(daly, checkpoint, restart, between)
    return Outcome(
        goodput=min(1.0, campaign.work / total),
        interval_steps=interval,
        interval_seconds=segment,
        checkpoints=saving / total,
        restarts=restarting / total,
        repeated=max(0.0, 1 - (campaign.work + saving + restarting) / total),
        days_without_failures=campaign.work / DAY,
        days_p50=half,
        days_p90=most,
        cost_p50=None if a_day is None else half * a_day,
        cost_p90=None if a_day is None else most * a_day,
        failures_p50=float(np.median(played.failures)),
        seconds_between_failures=None if math.isinf(between) else between,
        young_interval=young,
        young_daly_interval=daly,
        young_daly_goodput=expected,
        runs=runs,
    )


def best_interval(campaign: Campaign, seed: int = 0) -> int:
    """Steps between checkpoints that get most done between the failures of one long row.

    All candidates meet the same failures, so that the choice is not between luck and luck.
    """
    between = campaign.seconds_between_failures
    if math.isinf(between):
        return campaign.steps
    gaps = np.random.default_rng(seed).exponential(between, SEARCHED_FAILURES)
    uptime = np.maximum(0.0, gaps - campaign.restart_seconds)
    rough = max(campaign.step_time, young_interval(campaign.checkpoint_seconds, between))
    spread = np.round(np.geomspace(rough / 8, rough * 8, 128) / campaign.step_time)
    candidates = np.unique(np.clip(spread, 1, campaign.steps)).astype(int)
    segments = candidates * campaign.step_time + campaign.checkpoint_seconds
    done = [np.floor(uptime / segment).sum() for segment in segments] * candidates
    return int(candidates[int(np.argmax(done))])


def play(campaign: Campaign, interval: int, runs: int, seed: int = 0) -> Played:
    """Simulate runs that save every `interval` steps.

    Between two failures a run restarts, then finishes as many intervals as fit; the rest is lost. The last
    interval may be shorter, and ends in a checkpoint as well. The first start is not a restart.
    """
    chance = np.random.default_rng(seed)
    segment = interval * campaign.step_time + campaign.checkpoint_seconds
    intervals = math.ceil(campaign.steps / interval)
    shorter = (intervals * interval - campaign.steps) * campaign.step_time
    between = campaign.seconds_between_failures * np.exp(-campaign.rate_spread * chance.standard_normal(runs))
    played = Played(*np.zeros((3, runs)))
    left, going = np.full(runs, float(intervals)), np.arange(runs)
    restart = np.full((_BLOCK, 1), campaign.restart_seconds)
    restart[0] = 0.0
    while going.size:
        gaps = chance.exponential(1.0, (_BLOCK, going.size)) * between[going]
        uptime = np.maximum(0.0, gaps - restart)
        done = np.floor(uptime / segment).cumsum(axis=0)
        before = left[going] - np.vstack([np.zeros(going.size), done[:-1]])
        needed = before * segment - shorter
        ended = needed <= uptime
        # Of each run the failures up to its end; all of this block where it does not end.
        failures = np.where(ended.any(axis=0), ended.argmax(axis=0), _BLOCK)
        rows = np.arange(_BLOCK)[:, None]
        failed, last = rows < failures, rows == failures
        spent = np.where(failed, gaps, np.where(last, restart + needed, 0.0))
        played.seconds[going] += spent.sum(axis=0)
        played.failures[going] += failures
        played.restarting[going] += np.where(failed | last, np.minimum(gaps, restart), 0.0).sum(axis=0)
        left[going] -= done[-1]
        going = going[failures == _BLOCK]
        restart[0] = campaign.restart_seconds
    return played
