"""`fivefold bench matmul` and `fivefold bench mlp`: how near this device comes to its peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fivefold.commands.common import AsJson, print_json, print_table, reporting
from fivefold.problems import Problem, refuse

if TYPE_CHECKING:
    from fivefold.bench.reached import Bench, Sweep

OnDevice = Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: a GPU where there is one.")]
Seconds = Annotated[
    float | None,
    typer.Option(
        help="How long a sustained measurement lasts, after as long of the same. Default: 2 on a GPU, 0.5 on "
        "a CPU."
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="FILE.json", help="Measure nothing: show what --json has printed into this file."
    ),
]
Png = Annotated[str | None, typer.Option(help="Draw it into this file.")]


def matmul(
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Sides of the matrices, with commas between them. Default: 512, 1024, ... 32768 on a GPU, "
            "to 2048 on a CPU."
        ),
    ] = None,
    dtypes: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp16, tf32, fp32, with commas between them. Default: all on a GPU, fp32,bf16 on a "
            "CPU."
        ),
    ] = None,
    device: OnDevice = None,
    seconds: Seconds = None,
    saved: From = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Time square matrix products: how much of its peak a device reaches (HFU).

    Twice: fresh, after a rest, as figures are often printed; and sustained, in seconds of nothing else. At
    its limit of power a GPU lowers its clock, and training goes on for longer than a moment. HFU is the rate
    over the dense peak by the vendor's data (docs/hardware.md). Of a CPU no peak is known: TFLOP/s alone.

    \b
    Examples:
      fivefold bench matmul
      fivefold bench matmul --dtypes bf16 --sizes 4096,8192 --seconds 5
      fivefold bench matmul --json > here.json
      fivefold bench matmul --from here.json --png here.png
    """
    given = {"--sizes": sizes, "--dtypes": dtypes, "--device": device, "--seconds": seconds}
    with reporting(as_json):
        sweep = _saved("matmul", saved, given, png)
        if sweep is None:
            from fivefold.bench.asked import asked
            from fivefold.bench.products import USUAL, measure, needs
            from fivefold.report.figures import undrawable

            words = ("--sizes", sizes)
            sweep = measure(asked(device, dtypes, words, seconds, USUAL, needs, *undrawable(png)))
        _tell(sweep, png, as_json)


def mlp(
    width: Annotated[
        int | None, typer.Option(help="Of each layer, [width, width]. Default: 8192 on a GPU, 1024 on a CPU.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="How many, with ReLU behind each. Default: 8 on a GPU, 4 on a CPU.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Rows of the batch; several, with commas between them, are several measurements. Default: "
            "8192 on a GPU, 1024 on a CPU."
        ),
    ] = None,
    dtypes: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp16, tf32, fp32, with commas between them. Default: bf16 on a GPU, fp32 on a CPU."
        ),
    ] = None,
    device: OnDevice = None,
    seconds: Seconds = None,
    saved: From = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Time the training of a wide ReLU network: about the most that training can reach (MFU).

    Forward, backward and SGD on random rows: a transformer's feed-forward layers without most of what is
    bound by memory. MFU is 6 operations for each weight and row, over the time and the dense peak. Fresh,
    after a rest, and sustained, in seconds of nothing else.

    \b
    Examples:
      fivefold bench mlp
      fivefold bench mlp --width 4096 --rows 1024,4096,16384 --png rows.png
      fivefold bench mlp --json > here.json
      fivefold bench mlp --from here.json --png here.png
    """
    measuring = {"--rows": rows, "--dtypes": dtypes, "--device": device, "--seconds": seconds}
    given = {"--width": width, "--layers": layers} | measuring
    with reporting(as_json):
        sweep = _saved("mlp", saved, given, png)
        if sweep is None:
            from fivefold.bench.asked import asked, kind_of
            from fivefold.bench.wide_network import USUAL, measure, shape_of
            from fivefold.report.figures import undrawable

            shape, wrong = shape_of(kind_of(device), width, layers)
            words = ("--rows", rows)
            found = asked(device, dtypes, words, seconds, USUAL, shape.needs, *wrong, *undrawable(png))
            sweep = measure(found, shape)
        _tell(sweep, png, as_json)


def _saved(bench: Bench, path: str | None, given: Mapping[str, object], png: str | None) -> Sweep | None:
    """What was measured before; None where nothing of it is asked for. Raises `BadInput`."""
    if path is None:
        return None
    from fivefold.bench.saved import OPTION, read
    from fivefold.report.figures import undrawable

    beside = [name for name, value in given.items() if value is not None]
    hint = f"Leave out one of them: {OPTION} measures nothing."
    refuse([*(Problem(name, f"says nothing beside {OPTION}", hint) for name in beside), *undrawable(png)])
    return read(path, bench)


def _tell(sweep: Sweep, png: str | None, as_json: bool) -> None:
    from fivefold.bench.saved import as_json as told
    from fivefold.report import reached

    if png is not None:
        reached.picture(sweep, png)
    if as_json:
        print_json(told(sweep) | {"png": png})
        return
    print(f"{reached.title(sweep)}\n")
    print_table(reached.header(sweep), reached.rows(sweep))
    print("", *reached.remarks(sweep), sep="\n")
