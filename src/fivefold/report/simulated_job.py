"""A job's step on a cluster, and its whole training, ready to be shown. Times are in milliseconds."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.axes.checks import check
from fivefold.axes.layout import described
from fivefold.config import Job, resolve
from fivefold.config.resolve import unplanned
from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count
from fivefold.planner.auto import laid_out
from fivefold.planner.goodput import HOUR, Campaign, Outcome, checkpoint_seconds, simulate_run
from fivefold.planner.memory.fullest_rank import Memory, chance_of_running_out, counted_on, fits, memory
from fivefold.planner.play.simulated_step import SimulatedStep, simulated
from fivefold.planner.play.timeline import Event
from fivefold.problems import BadInput, Problem, refuse
from fivefold.report.shown import Shown
from fivefold.report.table import as_lines

DEFAULT_CLUSTER = "dgx-h100"
GIB = 2**30
MILLISECONDS = 1e3


@dataclass(frozen=True)
class Asked:
    """A complete job, and where it runs."""

    job: Job
    cluster: Cluster
    devices: int


def asked(job: Job, cluster: str | None, devices: int | None) -> Asked:
    """A job with nothing left open. Raises `BadInput`, or `BadNews` where `layout.auto` finds no layout.

    cluster  a name or a file; left out, what the job says, else dgx-h100
    devices  how many; left out, what the layout says
    """
    if devices is not None and not (isinstance(devices, int) and devices >= 1):
        raise BadInput([Problem("--gpus", f"is {devices}", "It must be at least 1.")])
    if job.model.module is not None:
        raise BadInput([unplanned("model.module", job.model.module)])
    named = cluster or job.cluster.file or job.cluster.preset or DEFAULT_CLUSTER
    machines = find_cluster(named)
    where = job.cluster.model_copy(update={"preset": named, "file": None})
    job = job.model_copy(update={"cluster": where})
    layout = job.layout
    said = (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp)
    ranks = devices or math.prod(degree or 1 for degree in said)
    refuse(machines.problems(ranks, "--gpus" if devices else "layout"))
    kind = machines.device.kind
    if layout.auto:
        job, _ = laid_out(job, ranks, kind, machines.device.name)
    job = resolve(job, ranks, kind)
    refuse(check(job))
    return Asked(job, machines, ranks)


def step_shown(question: Asked) -> Shown:
    """One step."""
    job, cluster = question.job, question.cluster
    step = simulated(job, cluster)
    setup = Setup.of(job)
    title = (
        f"{job.spec.name} on {question.devices:,} x {cluster.device.name} ({cluster.name}): "
        f"{described(job)}, {_counted(int(setup.micro_batches), 'micro-batch', 'micro-batches')} "
        f"of {_counted(int(setup.micro_batch), 'sequence', 'sequences')}"
    )
    needed = memory(setup, cluster)
    return Shown(
        title=title,
        rows={name: _in_milliseconds(row) for name, row in step.rows.items()},
        curves={
            name: [(moment * MILLISECONDS, level / GIB) for moment, level in curve]
            for name, curve in step.memory.items()
        },
        kept="memory, GiB",
        summary=_summary(step, needed, cluster),
        figures={
            "layout": {key: value for key, value in job.layout.model_dump().items() if value is not None},
            "cluster": cluster.name,
            "devices": question.devices,
            "step_time": step.took.step_time * MILLISECONDS,
            "step_time_s": step.took.step_time,
            "bubble": step.bubble,
            "exposed": {axis: seconds * MILLISECONDS for axis, seconds in step.took.exposed.items()},
            "optimizer": step.took.optimizer * MILLISECONDS,
            "peak_in_flight": step.in_flight,
            "held_gib": [max(level for _, level in curve) / GIB for curve in step.memory.values()],
            "memory_gib": float(needed.device) / GIB,
            **({"host_gib": float(needed.host) / GIB} if setup.offload else {}),
            "chance_of_running_out": float(chance_of_running_out(needed, cluster)),
            "fits": bool(fits(needed, cluster)),
        },
        unit="ms",
        counted="micro_batch" if job.layout.pp > 1 else "stage",
    )


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _size(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _in_milliseconds(row: Sequence[Event]) -> list[Event]:
    return [event._replace(start=event.start * MILLISECONDS, end=event.end * MILLISECONDS) for event in row]


def _summary(step: SimulatedStep, needed: Memory, cluster: Cluster) -> str:
    shares = {
        axis: seconds / step.took.step_time
        for axis, seconds in step.took.exposed.items()
        if seconds > 5e-4 * step.took.step_time
    }
    waits = ", ".join(f"{axis} {share:.1%}" for axis, share in shares.items()) or "none"
    held = [max(level for _, level in curve) for curve in step.memory.values()]
    figures = {
        "step": f"{step.took.step_time * MILLISECONDS:,.1f} ms, of which the optimizer "
        f"{step.took.optimizer * MILLISECONDS:,.2f}",
        "bubble": f"{step.bubble:.1%}",
        "exposed messages": waits,
        "held": ", ".join(map(_size, held)) + " at most, activations for backward included",
        "memory": _memory_line(needed, cluster),
    }
    return as_lines(figures)


def _memory_line(needed: Memory, cluster: Cluster) -> str:
    line = f"{_size(float(needed.device))} on the fullest device, of {cluster.device.memory_gib:g} GiB"
    line += f", and {_size(float(needed.host))} of its host's" if needed.host else ""
    if fits(needed, cluster):
        return line
    room, chance = counted_on(cluster), float(chance_of_running_out(needed, cluster))
    return f"{line}: does not fit ({room:.1f} can be counted on; {chance:.0%} likely to run out)"


def run_shown(
    question: Asked,
    shown: Shown,
    failures_per_gpu_hour: float | None = None,
    save_seconds: float | None = None,
    restart_seconds: float | None = None,
    price: float | None = None,
) -> tuple[str, dict[str, Any]]:
    """The whole training in words and in figures; what is None has the default of `planner/goodput.py`."""
    if save_seconds is None:
        save_seconds = checkpoint_seconds(parameter_count(question.job.spec), question.devices)
    given = {
        "checkpoint_seconds": save_seconds,
        "failures_per_gpu_hour": failures_per_gpu_hour,
        "restart_seconds": restart_seconds,
        "price": price if price is not None else question.cluster.price,
    }
    campaign = Campaign(
        step_time=shown.figures["step_time_s"],
        steps=question.job.training.steps,
        gpus=question.devices,
        **{key: value for key, value in given.items() if value is not None},
    )
    outcome = simulate_run(campaign)
    return run_text(campaign, outcome), {"campaign": asdict(campaign)} | asdict(outcome)


def run_text(campaign: Campaign, outcome: Outcome) -> str:
    """The outcome of a whole training, a line for each figure."""
    lost = {"saving": outcome.checkpoints, "restarts": outcome.restarts, "work done twice": outcome.repeated}
    half, most, least = (
        f"{days:,.1f}" if days >= 10 else f"{days:.3g}"
        for days in (outcome.days_p50, outcome.days_p90, outcome.days_without_failures)
    )
    figures = {
        "goodput": f"{outcome.goodput:.1%}; " + ", ".join(f"{why} {part:.1%}" for why, part in lost.items()),
        "days": f"{half} in half of all runs, {most} in nine of ten; {least} if nothing failed or was saved",
    }
    if outcome.cost_p50 is not None:
        figures["cost"] = f"${outcome.cost_p50:,.0f}, and ${outcome.cost_p90:,.0f}"
    figures["checkpoint every"] = (
        f"{outcome.interval_steps:,} steps = {outcome.interval_seconds:,.0f} s; "
        f"{campaign.checkpoint_seconds:,.1f} s to write"
    )
    if outcome.seconds_between_failures is not None:
        figures["failures"] = (
            f"{outcome.failures_p50:,.0f}, one every {outcome.seconds_between_failures / HOUR:,.2f} h; "
            f"{campaign.restart_seconds:,.0f} s to restart"
        )
    if outcome.young_daly_interval is not None:
        figures["by Young, Daly"] = (
            f"checkpoint every {outcome.young_interval:,.0f} s, {outcome.young_daly_interval:,.0f} s; "
            f"goodput {outcome.young_daly_goodput:.1%}"
        )
    return as_lines(figures)
