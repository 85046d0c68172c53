"""The few shapes that the pictures here are made of, as lines of SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

INK, GREY, LINE = "#1f2328", "#57606a", "#d0d7de"
BLUE, AMBER, GREEN, PURPLE, RED = "#0969da", "#bf8700", "#1a7f37", "#8250df", "#cf222e"
PALE = {BLUE: "#d8e8fb", AMBER: "#f8ebc8", GREEN: "#d6efdb", PURPLE: "#eadffb", RED: "#fbdcdc"}
FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


def text(
    x: float,
    y: float,
    words: str,
    size: float = 13,
    anchor: str = "start",
    bold: bool = False,
    colour: str = INK,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
    return f'<text {place}{weight} fill="{colour}">{escape(words)}</text>'


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    edge: str | None = None,
    radius: float = 0,
    dashed: bool = False,
) -> str:
    border = f' stroke="{edge}"' if edge else ""
    border += ' stroke-dasharray="4 3"' if dashed else ""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} rx="{radius:g}" fill="{fill}"{border}/>'


def labelled(x: float, y: float, width: float, height: float, colour: str, *lines: str) -> list[str]:
    """A pale box with an edge, and words in the middle of it; the first line is bold."""
    drawn = [box(x, y, width, height, PALE[colour], colour, 6)]
    first = y + height / 2 + 5 - 8.5 * (len(lines) - 1)
    for number, words in enumerate(lines):
        size, bold = (14, True) if number == 0 else (12, False)
        drawn.append(text(x + width / 2, first + 17 * number, words, size, "middle", bold))
    return drawn


def arrow(*points: tuple[float, float], colour: str = GREY, dashed: bool = False) -> str:
    """A line through the points with a tip at the last one."""
    way = " ".join(f"{x:g},{y:g}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes} '
        'marker-end="url(#tip)"/>'
    )


def save(script: str, title: str, width: float, height: float, drawn: Sequence[str]) -> None:
    """Write the picture beside the script that draws it."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" font-family="{FONT}">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0 L10 5 L0 10 Z" fill="{GREY}"/></marker></defs>',
        # A panel of its own, so that the picture reads the same on a light and on a dark page.
        box(1, 1, width - 2, height - 2, "#ffffff", LINE, 14),
    ]
    Path(script).with_suffix(".svg").write_text("\n".join([*head, *drawn, "</svg>", ""]))
