"""A planner's answer in words and in the cells of a table."""

from collections.abc import Sequence

from fivefold.planner.answer import Answer
from fivefold.planner.keys import in_words
from fivefold.planner.search.planned import Planned


def title(answer: Answer) -> str:
    """What was planned."""
    goal = answer.goal
    return (
        f"{goal.setup.spec.name} on {goal.gpus:,} x {answer.cluster.device.name} ({answer.cluster.name}), "
        f"{goal.setup.global_batch:,} sequences of {goal.setup.seq_len:,} tokens, {goal.setup.precision.name}"
    )


def columns(answer: Answer, layouts: Sequence[Planned]) -> tuple[list[str], list[list[str]]]:
    """The header, and a row of cells for each layout; days and cost where they are known."""
    header = ["layout", "step", "tok/s/GPU", "MFU", "GiB"]
    offload = answer.goal.setup.offload
    header += ["host GiB"] * offload
    costs = answer.tokens is not None and answer.price is not None
    header += ["days"] * (answer.tokens is not None) + ["cost"] * costs
    rows = []
    for planned in layouts:
        row = answer.row(planned)
        cells = [
            in_words(planned.setup),
            f"{row['step_time_s']:.4g} s",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['memory_gib']:.3g}",
        ]
        if offload:
            cells.append(f"{planned.host_gib:.3g}")
        if answer.tokens is not None:
            cells.append(f"{row['days']:.3g}")
        if costs:
            cells.append(f"{row['cost']:,.0f}")
        rows.append(cells)
    return header, rows


def spent(planned: Planned) -> str:
    """Where the time of a step goes, in one line; what is below 0.05% of it is left out."""
    took = planned.breakdown
    parts = {"compute": took.compute, "bubble": took.bubble}
    parts |= {f"exposed {axis} messages": seconds for axis, seconds in took.exposed.items()}
    parts["optimizer"] = took.optimizer
    told = [
        f"{name} {seconds:.3g} s ({seconds / took.step_time:.1%})"
        for name, seconds in parts.items()
        if seconds >= 5e-4 * took.step_time
    ]
    return f"of its {took.step_time:.4g} s the fastest spends: {', '.join(told)}"
