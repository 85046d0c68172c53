"""Writes coverage.md: the layouts that tests hold against one process.

    python -m docs.make_coverage

The rows are the cases of tests/axes/layouts.py, from which the tests are made.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.axes.layouts import AXES, SPLITS, Split

PAGE = Path(__file__).with_name("coverage.md")

HEAD = """# What is held against one process

Each row is a layout whose every gradient, summed and clipped, was compared with one process in float64, to
1e-11 of the largest entry of that gradient; loss and gradient norm too, also over three AdamW steps, to
1e-9. Rows with a `precision` are held to the same float64 numbers, within what the roundings of that
precision add up to. Rows marked with a dot run in `make test`, all others in `make test-all`. This page is
made from the tests' own list by `python -m docs.make_coverage`.

Micro-batches have two rows where nothing else is said. In "all pairs of settings" every two settings that go
together do so in some row: axes, ZeRO stage, when gradients are reduced, schedule, kind of context,
recomputation, model, rows, sequence parallelism, spread experts and how they are balanced.

Models: `dense` has 4 layers (one for each stage at least), 4 heads, 2 key heads, rotary positions, SwiGLU
and a vocabulary of 67, which no rank count divides; `tied` has tied embeddings, layer norms, learned
positions and biases everywhere; `experts` has 4 experts in each layer, 2 for each token, and a shared one;
`gemma` is `dense` with what Gemma 2 has of its own: soft caps, norms behind layers, a window in every other
layer, scaled and tied embeddings; `one key` has one key head, norms of queries and keys, and biases;
`parallel` computes attention and feed-forward side by side. Sequences hold several documents.
"""


def row(split: Split) -> str:
    degrees = split.degrees
    cells = ["•" if not split.slow else "", str(split.ranks), split.model]
    cells += [str(degrees.get(axis, "")) for axis in (*AXES, "ep")]
    others = {k: v for k, v in degrees.items() if k not in (*AXES, "ep", "zero")} | dict(split.training)
    cells += [str(degrees.get("zero", 0)), ", ".join(f"{k} {v}" for k, v in others.items())]
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    columns = ["", "ranks", "model", *AXES, "ep", "zero", "settings"]
    for group, members in groupby(SPLITS.values(), key=lambda split: split.group):
        rows = [row(split) for split in members]
        parts.append(f"## {group.capitalize()}: {len(rows)}\n")
        parts += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *rows, ""]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
