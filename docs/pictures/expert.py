"""Draws expert.svg: tokens of two ranks on their way to four experts and back.

    python docs/pictures/expert.py

The router's choices are made up.
"""

from __future__ import annotations

from drawing import AMBER, BLUE, GREEN, GREY, INK, PALE, PURPLE, arrow, box, labelled, save, text

WIDTH, HEIGHT = 920, 424
TOP, ROW = 92, 132
COLOURS = (BLUE, AMBER)
EXPERTS = ("A", "B", "C", "D")  # two on each rank
# Each token's two experts, chosen by the router.
CHOSEN = ((("t0", "AC"), ("t1", "AB"), ("t2", "CD")), (("t3", "AC"), ("t4", "CD"), ("t5", "BC")))
SIZE, GAP = 24, 4


def token(x: float, y: float, name: str, rank: int, expert: str = "") -> list[str]:
    return [
        box(x, y, SIZE, SIZE, COLOURS[rank], None, 3),
        text(x + SIZE / 2, y + 16, expert or name, 12, "middle", bool(expert), "#ffffff"),
    ]


def row_of(x: float, y: float, tokens: list[tuple[str, int, str]], wrap: int = 6) -> list[str]:
    drawn = []
    for number, (name, rank, expert) in enumerate(tokens):
        place = x + number % wrap * (SIZE + GAP), y + number // wrap * (SIZE + GAP)
        drawn += token(*place, name, rank, expert)
    return drawn


def sent(rank: int) -> list[tuple[str, int, str]]:
    """A rank's tokens, once for each expert they go to, sorted by expert."""
    return [(name, rank, e) for e in EXPERTS for name, chosen in CHOSEN[rank] if e in chosen]


def received(rank: int, expert: str) -> list[tuple[str, int, str]]:
    return [row for sender in range(2) for row in sent(sender) if row[2] == expert]


def message(x: float, name: str) -> list[str]:
    height = 2 * ROW - 8
    return [
        box(x, TOP - 16, 40, height, PALE[PURPLE], PURPLE, 8),
        f'<text transform="translate({x + 25:g} {TOP - 16 + height / 2:g}) rotate(-90)" font-size="15" '
        f'font-weight="bold" text-anchor="middle" fill="{INK}">{name}</text>',
    ]


def lane(rank: int) -> list[str]:
    y = TOP + rank * ROW
    middle = y + 46
    drawn = [text(20, middle + 5, f"rank {rank}", 14, bold=True)]
    drawn += row_of(84, middle - SIZE / 2, [(name, rank, "") for name, _ in CHOSEN[rank]])
    drawn += [arrow((170, middle), (190, middle)), *labelled(193, middle - 20, 66, 40, GREEN, "router")]
    drawn += [arrow((260, middle), (280, middle)), *row_of(284, middle - SIZE - 2, sent(rank), wrap=3)]
    drawn += [arrow((370, middle), (392, middle)), arrow((436, middle), (458, middle))]
    for number, expert in enumerate(EXPERTS[2 * rank : 2 * rank + 2]):
        top = y + 52 * number
        drawn += [
            box(462, top, 252, 44, PALE[GREEN], GREEN, 6),
            text(474, top + 27, f"expert {expert}", 13, bold=True),
        ]
        drawn += row_of(548, top + 10, received(rank, expert))
    drawn += [arrow((716, middle), (738, middle)), arrow((782, middle), (806, middle))]
    drawn += row_of(810, middle - SIZE / 2, [(name, rank, "") for name, _ in CHOSEN[rank]])
    return drawn


if __name__ == "__main__":
    words = (
        "Six tokens on two ranks, four experts, two for each token: as many rows travel as the router says"
    )
    drawn = [text(20, 38, words, 15, bold=True)]
    for rank in range(2):
        drawn += lane(rank)
    drawn += [*message(394, "all-to-all"), *message(740, "all-to-all")]
    y = TOP + 2 * ROW + 10
    for x, lines in (
        (124, ("tokens",)),
        (325, ("one row for each", "choice, sorted")),
        (588, ("each expert takes all that come:", "nothing dropped, nothing padded")),
        (850, ("weighted", "and added")),
    ):
        drawn += [text(x, y + 16 * n, line, 12, "middle", colour=GREY) for n, line in enumerate(lines)]
    drawn.append(text(20, HEIGHT - 18, "Backward takes the same two ways in the other direction.", 13))
    save(__file__, "The expert axis: tokens go to the ranks that hold their experts", WIDTH, HEIGHT, drawn)
