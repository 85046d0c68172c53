"""Draws tensor.svg: a feed-forward layer on two tp ranks, and where its messages are.

    python docs/pictures/tensor.py

Sizes are schematic; what is split how, and where messages are, is as in axes/tensor.py.
"""

from __future__ import annotations

from drawing import AMBER, BLUE, GREEN, GREY, INK, LINE, PALE, PURPLE, arrow, box, save, text

WIDTH, HEIGHT = 920, 472
TOP, ROW = 84, 150
HIGH = 96  # of a tensor that has all tokens
COLOURS = (BLUE, AMBER)


def tokens(x: float, y: float, width: float, rank: int | None, colour: str) -> list[str]:
    """Tokens downwards: those of one rank in full colour, or all of them."""
    drawn = [box(x, y, width, HIGH, PALE[colour], LINE)]
    if rank is None:
        return [box(x, y, width, HIGH, colour)]
    return [*drawn, box(x, y + rank * HIGH / 2, width, HIGH / 2, colour)]


def matrix(x: float, y: float, width: float, height: float, rank: int, by_output: bool) -> list[str]:
    """A weight matrix [in, out], drawn with inputs downwards; this rank's part in full colour."""
    colour = COLOURS[rank]
    drawn = [box(x, y, width, height, "#f3f4f6", GREY)]
    if by_output:
        return [*drawn, box(x + rank * width / 2, y, width / 2, height, colour, GREY)]
    return [*drawn, box(x, y + rank * height / 2, width, height / 2, colour, GREY)]


def message(x: float, name: str) -> list[str]:
    """A bar across both ranks."""
    height = ROW + HIGH + 36
    return [
        box(x, TOP - 18, 42, height, PALE[PURPLE], PURPLE, 8),
        f'<text transform="translate({x + 26:g} {TOP - 18 + height / 2:g}) rotate(-90)" font-size="15" '
        f'font-weight="bold" text-anchor="middle" fill="{INK}">{name}</text>',
    ]


def lane(rank: int) -> list[str]:
    """What one rank computes."""
    y = TOP + rank * ROW
    middle = y + HIGH / 2
    colour = COLOURS[rank]
    drawn = [text(22, middle + 5, f"rank {rank}", 14, bold=True)]
    drawn += tokens(92, y, 34, rank, colour)
    drawn += [box(152, middle - 17, 62, 34, "#ffffff", GREY, 6), text(183, middle + 5, "norm", 13, "middle")]
    drawn += [arrow((128, middle), (151, middle)), arrow((215, middle), (239, middle))]
    drawn += [arrow((284, middle), (303, middle)), *tokens(306, y, 34, None, GREEN)]
    drawn += [text(352, middle + 5, "×", 16, "middle"), *matrix(364, middle - 26, 104, 52, rank, True)]
    drawn += [
        arrow((470, middle), (492, middle)),
        *hidden(496, y, rank),
        text(574, middle + 5, "×", 16, "middle"),
    ]
    drawn += [*matrix(588, middle - 52, 52, 104, rank, False), text(654, middle + 5, "=", 16, "middle")]
    drawn += [box(668, y, 34, HIGH, "#ffffff", colour), *stripes(668, y, 34, colour)]
    drawn += [arrow((706, middle), (741, middle)), arrow((787, middle), (812, middle))]
    drawn += [text(826, middle + 6, "+", 18, "middle"), *tokens(842, y, 34, rank, colour)]
    return drawn


def hidden(x: float, y: float, rank: int) -> list[str]:
    """Hidden units of all tokens: this rank's half of them."""
    colour = COLOURS[rank]
    return [box(x, y, 64, HIGH, "#f3f4f6", LINE), box(x + 32 * rank, y, 32, HIGH, colour)]


def stripes(x: float, y: float, width: float, colour: str) -> list[str]:
    """A partial sum."""
    return [box(x, y + offset, width, 4, PALE[colour]) for offset in range(6, HIGH - 6, 10)]


def labels() -> list[str]:
    """What stands below the second rank."""
    y = TOP + ROW + HIGH + 42
    columns = (
        (109, "stream", "[B, S/2, dim]"),
        (323, "all tokens", "[B, S, dim]"),
        (416, "up:", "by output"),
        (528, "hidden units", "[B, S, ffn/2]"),
        (614, "down:", "by input"),
        (690, "partial sums", "[B, S, dim]"),
        (859, "stream", "[B, S/2, dim]"),
    )
    return [
        text(x, y + 16 * n, words, 12, "middle", colour=GREY)
        for x, *lines in columns
        for n, words in enumerate(lines)
    ]


if __name__ == "__main__":
    words = "A feed-forward layer on two tensor-parallel ranks. Tokens go downwards, features to the right."
    drawn = [text(22, 36, words, 14, bold=True)]
    for rank in range(2):
        drawn += lane(rank)
    drawn += message(241, "all-gather")
    drawn += message(743, "reduce-scatter")
    drawn += labels()
    below = (
        "Backward goes the other way: an all-gather where the reduce-scatter is, a reduce-scatter where the "
        "all-gather is.",
        "Attention is the same with heads for hidden units: query, key and value by output, its output "
        "projection by input.",
    )
    drawn += [text(22, HEIGHT - 42 + 20 * n, line, 13) for n, line in enumerate(below)]
    save(__file__, "A feed-forward layer on two tensor-parallel ranks", WIDTH, HEIGHT, drawn)
