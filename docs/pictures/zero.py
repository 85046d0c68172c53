"""Draws zero.svg: which rank holds what under each ZeRO stage and under HSDP.

    python docs/pictures/zero.py

Bars are as wide as the bytes of one parameter in bf16 training: 2 compute weights, 4 gradients, 12 states.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RANKS = 4
BYTE = 9  # pixels
GAP = 3
LEFT, TOP, ROW, COLUMN = 214, 108, 70, 190
WIDTH, HEIGHT = LEFT + RANKS * COLUMN, TOP + 5 * ROW
PARTS = (("weights", 2, "#0969da"), ("gradients", 4, "#bf8700"), ("states", 12, "#1a7f37"))
PALE = {"#0969da": "#d8e8fb", "#bf8700": "#f8ebc8", "#1a7f37": "#d6efdb"}
FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK = "#1f2328"


@dataclass(frozen=True)
class Stage:
    """A row of the picture.

    split     parts that are split over `group` neighbouring ranks
    gathered  weights are there one layer at a time
    """

    name: str
    note: str
    split: frozenset[str] = frozenset()
    gathered: bool = False
    group: int = RANKS


STAGES = (
    Stage("zero = 0", "every rank holds all"),
    Stage("zero = 1", "states are split", frozenset({"states"})),
    Stage("zero = 2", "gradients too", frozenset({"states", "gradients"})),
    Stage("zero = 3", "weights too", frozenset({"states", "gradients"}), gathered=True),
    Stage("HSDP 2 x 2", "zero = 3, two copies", frozenset({"states", "gradients"}), gathered=True, group=2),
)


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place}{weight} fill="{INK}">{words}</text>'


def bar(x: float, y: float, width: float, colour: str, height: int = 34, dashed: bool = False) -> str:
    edge = f' stroke="{INK}" stroke-dasharray="3 2"' if dashed else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" fill="{colour}"{edge}/>'


def cell(stage: Stage, rank: int, x: float, y: float) -> list[str]:
    """The three bars of one rank: pale where others hold it, full where this rank does."""
    drawn = []
    for name, size, colour in PARTS:
        width = size * BYTE
        if name == "weights" and stage.gathered:
            drawn.append(bar(x, y, width, PALE[colour], dashed=True))
        elif name in stage.split:
            share = width / stage.group
            drawn += [bar(x, y, width, PALE[colour]), bar(x + share * (rank % stage.group), y, share, colour)]
        else:
            drawn.append(bar(x, y, width, colour))
        x += width + GAP
    return drawn


def legend() -> list[str]:
    drawn = []
    for number, (name, size, colour) in enumerate(PARTS):
        x = 24 + 250 * number
        drawn += [
            bar(x, 18, 18, colour, height=18),
            text(x + 26, 32, f"{name}: {size} bytes a parameter"),
        ]
    drawn += [bar(24, 46, 18, PALE["#1a7f37"], height=18), text(50, 60, "pale: other ranks hold it")]
    drawn += [
        bar(274, 46, 18, PALE["#0969da"], height=18, dashed=True),
        text(300, 60, "dashed: gathered one layer at a time, from the shards of the states"),
    ]
    return drawn


def picture() -> str:
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="{FONT}">',
        "<title>Who holds what: ZeRO 0 to 3 and HSDP on four ranks</title>",
        # A panel of its own, so that the picture reads the same on a light and on a dark page.
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="14" '
        'fill="#ffffff" stroke="#d0d7de"/>',
        *legend(),
    ]
    for rank in range(RANKS):
        drawn.append(text(LEFT + rank * COLUMN + 84, TOP - 14, f"rank {rank}", 14, "middle", bold=True))
    for row, stage in enumerate(STAGES):
        y = TOP + row * ROW
        drawn += [text(24, y + 14, stage.name, 14, bold=True), text(24, y + 32, stage.note)]
        for rank in range(RANKS):
            drawn += cell(stage, rank, LEFT + rank * COLUMN, y)
    return "\n".join([*drawn, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("zero.svg").write_text(picture())
