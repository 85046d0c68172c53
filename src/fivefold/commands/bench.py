"""`fivefold bench`: how fast this machine is, part by part."""

from typing import Annotated, Literal

import typer

from fivefold.commands.common import AsJson, print_json, print_table, reporting

bench = typer.Typer(
    help="Measure parts of this machine: collectives, algorithm by algorithm.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.callback()
def _group() -> None:
    """With a callback, one command of a group keeps its name."""


@bench.command()
def collectives(
    ranks: Annotated[int, typer.Option(help="How many ranks send to each other.")] = 4,
    operation: Annotated[
        str | None, typer.Option(help="Only one: all_reduce, all_gather, reduce_scatter, ... Default: all.")
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Default: GPUs where there is one for each rank.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.", min=1.0)] = 30.0,
    draw: Annotated[
        str | None,
        typer.Option(
            metavar="ALGORITHM",
            help="Measure nothing: show an algorithm step by step. naive, ring, tree, halving-doubling, "
            "tree-broadcast, tree-reduce, ring-all-gather, ring-reduce-scatter or pairwise.",
        ),
    ] = None,
    png: Annotated[str | None, typer.Option(help="Draw a picture of it into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time collectives by each algorithm, beside the backend's own; or draw one.

    The algorithms are written out over plain send and receive. Algorithm bandwidth: bytes of the tensor
    over the time. Bus bandwidth: what a rank has to send at the least, over the time. The fit: time =
    latency + bytes / bandwidth.

    \b
    Examples:
      fivefold bench collectives --ranks 4 --operation all_reduce
      fivefold bench collectives --draw ring --ranks 4
      fivefold bench collectives --draw halving-doubling --ranks 6 --png steps.png
    """
    with reporting(as_json):
        if draw is not None:
            _draw(draw, ranks, png, as_json)
        else:
            _measure(ranks, operation, device, seconds, png, as_json)


def _draw(name: str, ranks: int, png: str | None, as_json: bool) -> None:
    from fivefold.problems import refuse, unwritable
    from fivefold.report import drawn_steps

    refuse(unwritable(png, "--png"))
    algorithm = drawn_steps.drawable(name, ranks)
    if png is not None:
        drawn_steps.picture(algorithm, ranks, png)
    if as_json:
        print_json(drawn_steps.as_json(algorithm, ranks) | {"png": png})
    else:
        print("\n".join(drawn_steps.lines(algorithm, ranks)))


def _measure(
    ranks: int,
    operation: str | None,
    device: Literal["cpu", "cuda"] | None,
    seconds: float,
    png: str | None,
    as_json: bool,
) -> None:
    import torch

    from fivefold.bench.collectives import check, measure
    from fivefold.problems import refuse
    from fivefold.report import collectives as told

    kind = device or ("cuda" if 1 < ranks <= torch.cuda.device_count() else "cpu")
    refuse(check(ranks, kind, operation, png))
    timed = measure(ranks, kind, operation, seconds)
    backend = timed[0].case.algorithm
    title = f"{ranks} ranks over {backend}"
    if png is not None:
        told.picture(timed, title, png)
    if as_json:
        print_json(told.as_json(timed, backend) | {"png": png})
        return
    print(f"{title}\n")
    print_table(told.HEADER, told.rows(timed))
    print("\ntime = latency + bytes / bandwidth\n")
    print_table(told.FIT_HEADER, told.fits(timed))
