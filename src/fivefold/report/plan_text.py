"""A planner's answer in words and in the cells of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.planner.answer import Answer
from fivefold.planner.search.best import Planned


def title(answer: Answer) -> str:
    """What was planned."""
    goal = answer.goal
    return (
        f"{goal.spec.name} on {goal.gpus:,} x {answer.cluster.device.name} ({answer.cluster.name}), "
        f"{goal.global_batch:,} sequences of {goal.seq_len:,} tokens, {goal.precision.name}"
    )


def columns(answer: Answer, layouts: Sequence[Planned]) -> tuple[list[str], list[list[str]]]:
    """The header, and a row of cells for each layout; days and cost where they are known."""
    header = ["layout", "step", "tok/s/GPU", "MFU", "GiB"]
    costs = answer.tokens is not None and answer.price is not None
    header += ["days"] * (answer.tokens is not None) + ["cost"] * costs
    rows = []
    for planned in layouts:
        row = answer.row(planned)
        cells = [
            layout_words({**row["layout"], **row["training"]}),
            f"{row['step_time_s']:.4g} s",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['memory_gib']:.3g}",
        ]
        if answer.tokens is not None:
            cells.append(f"{row['days']:.3g}")
        if costs:
            cells.append(f"{row['cost']:,.0f}")
        rows.append(cells)
    return header, rows


def layout_words(keys: dict[str, Any]) -> str:
    """A layout in one short line: `dp_shard 64 (zero 3) x tp 8 x pp 4 (1f1b), micro-batch 2`."""
    words = []
    if keys["dp_replicate"] > 1:
        words.append(f"dp_replicate {keys['dp_replicate']}")
    if keys["dp_shard"] > 1 or keys["zero"]:
        words.append(f"dp_shard {keys['dp_shard']} (zero {keys['zero']})")
    if keys["cp"] > 1:
        words.append(f"cp {keys['cp']} ({keys['cp_kind']})")
    words += [f"{axis} {keys[axis]}" for axis in ("tp", "ep") if keys[axis] > 1]
    if keys["pp"] > 1:
        turns = f" x{keys['virtual_stages']}" if keys["virtual_stages"] > 1 else ""
        words.append(f"pp {keys['pp']} ({keys['schedule']}{turns})")
    line = " x ".join(words) or "one device"
    line += f", micro-batch {keys['micro_batch']}"
    line += "" if keys["recompute"] == "none" else f", recompute {keys['recompute']}"
    return line + (", compiled" if keys["compile"] else "")
