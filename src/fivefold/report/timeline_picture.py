"""A timeline as a picture: who computes when, the gaps, and below what is kept in memory."""

from collections.abc import Sequence
from typing import Any

from fivefold.planner.play.timeline import Event
from fivefold.report.figures import pyplot, save
from fivefold.report.shown import LOOKS, Shown

Axes = Any
"""Matplotlib's, which is imported only when something is drawn."""
WAITING: dict[str, Any] = {"facecolor": "#eceef1", "hatch": "////", "edgecolor": "#d8dbe0", "linewidth": 0}
WIDTH = 14.0
"""Of the picture, in inches."""
DIGIT = 0.064
"""About how wide one digit of the labels is, in inches."""
THIN = 0.04
"""Inches of a bar that is not set off from its neighbours."""
MOST_LABELS = 4000
MOST_NAMES = 16


def draw(shown: Shown, path: str) -> None:
    """Write the picture to a file, whose ending says in which format. Raises `BadInput`."""
    plt = pyplot()
    height = max(1.5, 0.34 * len(shown.rows))
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(WIDTH, height + 3.0), sharex=True, height_ratios=(height, 1.9), layout="constrained"
    )
    _draw_rows(above, shown)
    _draw_curves(below, shown)
    save(figure, path)


def _draw_rows(axes: Axes, shown: Shown) -> None:
    inches = (WIDTH - 1.2) / (shown.end - shown.start)
    kinds: dict[str, None] = {}
    few = sum(map(len, shown.rows.values())) <= MOST_LABELS
    for place, row in enumerate(shown.rows.values()):
        if not row:
            continue
        box = (place - 0.42, 0.84)
        axes.broken_barh([(row[0].start, row[-1].end - row[0].start)], box, **WAITING)
        for kind in dict.fromkeys(event.kind for event in row):
            kinds[kind] = None
            colour = LOOKS[kind].colour
            bars = [(event.start, event.end - event.start) for event in row if event.kind == kind]
            wide = [bar for bar in bars if bar[1] * inches > THIN]
            narrow = [bar for bar in bars if bar[1] * inches <= THIN]  # of which edges would leave nothing
            axes.broken_barh(wide, box, facecolor=colour, edgecolor="white", linewidth=0.4)
            axes.broken_barh(narrow, box, facecolor=colour, edgecolor=colour, linewidth=0.2)
        for event in row if few else ():
            _label(axes, event, shown.number(event), place, inches)
    axes.set_title(shown.title, loc="left", fontsize=12, fontweight="bold", pad=22)
    axes.set_yticks(range(len(shown.rows)), list(shown.rows))
    axes.set_ylim(len(shown.rows) - 0.4, -0.6)
    axes.set_xlim(shown.start, shown.end)
    axes.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    _legend(axes, list(kinds))


def _label(axes: Axes, event: Event, text: str, place: int, inches: float) -> None:
    """A number on the event's box, where that is wide enough."""
    if not text or (event.end - event.start) * inches < DIGIT * (len(text) + 0.4):
        return
    colour = "#222222" if event.kind == "backward-weight" else "white"
    middle = (event.start + event.end) / 2
    axes.text(middle, place, text, ha="center", va="center", fontsize=7, color=colour)


def _legend(axes: Axes, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch  # type: ignore[import-not-found]

    patches = [Patch(facecolor=LOOKS[kind].colour, label=LOOKS[kind].name) for kind in kinds]
    patches.append(Patch(**WAITING, label="waiting"))
    axes.legend(
        handles=patches,
        ncols=len(patches),
        loc="lower right",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize=9,
    )


def _draw_curves(axes: Axes, shown: Shown) -> None:
    import matplotlib

    shades = matplotlib.colormaps["viridis"]
    last = max(len(shown.curves) - 1, 1)
    for place, (name, curve) in enumerate(shown.curves.items()):
        level_at = dict(curve)  # of changes at one moment the last one counts
        times, levels = [*level_at, shown.end], [*level_at.values(), curve[-1][1]]
        colour = shades(0.9 * place / last)
        axes.step(times, levels, where="post", color=colour, linewidth=1.3, label=name)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(shown.kept)
    axes.set_xlabel(f"time, {shown.unit}")
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if 1 < len(shown.curves) <= MOST_NAMES:
        axes.legend(
            ncols=min(len(shown.curves), 8),
            fontsize=8,
            frameon=False,
            loc="lower right",
            bbox_to_anchor=(1, 0.98),
        )
