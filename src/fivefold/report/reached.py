"""How near a device came to its peak: a table, sentences, a picture."""

from typing import Any

from fivefold.bench.reached import Point, Reached, Sweep
from fivefold.report.figures import pyplot, save

SHARE = {"matmul": "HFU", "mlp": "MFU"}
SIZE = {"matmul": "size", "mlp": "rows"}
COLOURS = {"bf16": "#1864ab", "fp16": "#2b8a3e", "tf32": "#d9480f", "fp32": "#862e9c"}


def title(sweep: Sweep) -> str:
    """What was computed, on which device."""
    what = "square products"
    if sweep.bench == "mlp":
        width = f"{sweep.shape['width']:,}"
        what = f"training of a ReLU network, {sweep.shape['layers']} layers of {width} x {width}"
    return f"{what}: {sweep.device}, torch {sweep.torch}"


def header(sweep: Sweep) -> tuple[str, ...]:
    share = (SHARE[sweep.bench],) if sweep.peaks else ()
    return ("dtype", SIZE[sweep.bench], "fresh TFLOP/s", *share, "sustained TFLOP/s", *share)


def rows(sweep: Sweep) -> list[tuple[str, ...]]:
    """One for each dtype and size."""
    return [(point.dtype, f"{point.size:,}", *_figures(sweep, point)) for point in sweep.points]


def _figures(sweep: Sweep, point: Point) -> list[str]:
    shares = sweep.shares(point)
    found = []
    for index, rate in enumerate(point.reached):
        found.append(f"{rate / 1e12:,.4g}")
        if sweep.peaks:
            found.append("" if shares is None else f"{shares[index]:.1%}")
    return found


def remarks(sweep: Sweep) -> list[str]:
    """What the columns are, and which peak the shares are of."""
    seconds = f"{sweep.seconds:g} s"
    found = [f"fresh: after a rest; sustained: in {seconds} of nothing else, after {seconds} of the same"]
    used = dict.fromkeys(point.dtype for point in sweep.points)
    known = [f"{name} {sweep.peaks[name] / 1e12:,.5g}" for name in used if name in sweep.peaks]
    unknown = [name for name in used if name not in sweep.peaks]
    if known:
        found.append(f"peaks, dense, in TFLOP/s: {', '.join(known)}")
    if unknown:
        of = f" in {', '.join(unknown)}" if known else ""
        found.append(f"no peak of this device{of} is known, so there is no {SHARE[sweep.bench]} to give")
    return found


def picture(sweep: Sweep, path: str) -> None:
    """Share of the peak, or TFLOP/s where none is known: lines over sizes, bars of one. Raises `BadInput`."""
    plt = pyplot()
    figure, place = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    points = [point for point in sweep.points if not sweep.peaks or sweep.shares(point)]
    sizes = sorted({point.size for point in points})
    if len(sizes) > 1:
        _lines(place, sweep, points, sizes)
    else:
        _bars(place, sweep, points)
    place.set_ylabel(f"{SHARE[sweep.bench]}, %" if sweep.peaks else "TFLOP/s")
    if sweep.peaks:
        place.set_ylim(0, 100)
    place.grid(alpha=0.25, axis="y")
    place.legend(fontsize=8, frameon=False)
    place.set_title(f"{title(sweep)}\n{remarks(sweep)[0]}", fontsize=9)
    save(figure, path)


def _heights(sweep: Sweep, point: Point) -> Reached:
    """What is drawn of a point: percent, or TFLOP/s."""
    shares = sweep.shares(point)
    return (
        Reached(*(100 * share for share in shares)) if shares else Reached(*(r / 1e12 for r in point.reached))
    )


def _lines(place: Any, sweep: Sweep, points: list[Point], sizes: list[int]) -> None:
    for dtype in dict.fromkeys(point.dtype for point in points):
        of = sorted((point for point in points if point.dtype == dtype), key=lambda point: point.size)
        for kind, style in (("fresh", "-"), ("sustained", "--")):
            heights = [getattr(_heights(sweep, point), kind) for point in of]
            label = f"{dtype}, {kind}"
            place.plot(
                [point.size for point in of],
                heights,
                style,
                marker="o",
                markersize=3,
                color=COLOURS.get(dtype),
                label=label,
            )
    place.set_xscale("log", base=2)
    place.set_xticks(sizes, [f"{size:,}" for size in sizes])
    place.set_xlabel("side of the matrices" if sweep.bench == "matmul" else "rows")


def _bars(place: Any, sweep: Sweep, points: list[Point]) -> None:
    for index, kind in enumerate(("fresh", "sustained")):
        heights = [getattr(_heights(sweep, point), kind) for point in points]
        places = [number + 0.4 * (index - 0.5) for number in range(len(points))]
        place.bar_label(place.bar(places, heights, width=0.36, label=kind), fmt="%.3g", fontsize=8)
    labels = [f"{point.dtype}, {SIZE[sweep.bench]} {point.size:,}" for point in points]
    place.set_xticks(range(len(points)), labels)
    place.set_xlim(-1, len(points))
