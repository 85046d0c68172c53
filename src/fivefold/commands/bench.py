"""`fivefold bench`: how fast this machine is, part by part."""

from collections.abc import Mapping
from textwrap import fill
from typing import Annotated, Literal

import typer

from fivefold.commands.bench_compute import matmul, mlp
from fivefold.commands.common import AsJson, print_json, print_table, reporting
from fivefold.problems import Problem, refuse

bench = typer.Typer(
    help="Measure parts of this machine: collectives, matrix products, a wide network.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
bench.command()(matmul)
bench.command()(mlp)

RANKS = 4
LINE = 110
SECONDS = 30.0


@bench.command()
def collectives(
    ranks: Annotated[
        int | None, typer.Option(help=f"How many ranks send to each other. Default: {RANKS}.")
    ] = None,
    operation: Annotated[
        str | None, typer.Option(help="Only one: all_reduce, all_gather, reduce_scatter, ... Default: all.")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the whole tensor, with commas between them: 64KiB,64MB. Default: 1 KiB to 16 MiB, "
            "without those that would take too long."
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Default: GPUs where there is one for each rank.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help=f"About how long to measure. Default: {SECONDS:g}.", min=1.0)
    ] = None,
    draw: Annotated[
        str | None,
        typer.Option(
            metavar="ALGORITHM",
            help="Measure nothing: show an algorithm step by step. naive, ring, tree, halving-doubling, "
            "tree-broadcast, tree-reduce, ring-all-gather, ring-reduce-scatter or pairwise.",
        ),
    ] = None,
    worked_examples: Annotated[
        bool,
        typer.Option(
            "--worked-examples",
            help="Measure nothing: what data parallelism sends against what it computes, for 7B on 8 A100s, "
            "70B on 64 H100s and 1T on 4,096 H100s, and where it breaks down.",
        ),
    ] = False,
    png: Annotated[str | None, typer.Option(help="Draw a picture of it into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time collectives by each algorithm, beside the backend's own; or draw one.

    The algorithms are written out over plain send and receive. Algorithm bandwidth: bytes of the tensor
    over the time. Bus bandwidth: what a rank has to send at the least, over the time. Busiest rank: what it
    sends, in tensors, counted as it is sent. The fit: time = latency + bytes / bandwidth.

    \b
    Examples:
      fivefold bench collectives --ranks 4 --operation all_reduce
      fivefold bench collectives --ranks 8 --operation all_reduce --sizes 64MB
      fivefold bench collectives --draw ring --ranks 4
      fivefold bench collectives --draw halving-doubling --ranks 6 --png steps.png
      fivefold bench collectives --worked-examples
    """
    number = RANKS if ranks is None else ranks
    measuring = {"--operation": operation, "--sizes": sizes, "--device": device, "--seconds": seconds}
    with reporting(as_json):
        if worked_examples:
            others = {"--ranks": ranks, "--draw": draw, "--png": png, **measuring}
            _refuse_beside("--worked-examples", others)
            _work_examples(as_json)
        elif draw is not None:
            _refuse_beside("--draw", measuring)
            _draw(draw, number, png, as_json)
        else:
            _measure(number, operation, sizes, device, SECONDS if seconds is None else seconds, png, as_json)


def _refuse_beside(option: str, others: Mapping[str, object]) -> None:
    """An option that measures nothing leaves nothing for those that say what to measure."""
    given = [name for name, value in others.items() if value is not None]
    refuse(Problem(name, f"says nothing beside {option}", f"Leave {name} or {option} out.") for name in given)


def _work_examples(as_json: bool) -> None:
    from fivefold.planner.worked_examples import CASES, AllReduce, ratio
    from fivefold.report import worked_examples as told

    example, ratios = AllReduce(), [ratio(case) for case in CASES]
    if as_json:
        print_json(told.as_json(example, ratios))
        return
    print(f"{fill(told.first_line(example), LINE)}\n")
    print_table(told.header(ratios), told.rows(ratios))
    for sentence in (*told.assumptions(ratios), *told.where_it_breaks_down(ratios)):
        print(f"\n{fill(sentence, LINE)}")


def _draw(name: str, ranks: int, png: str | None, as_json: bool) -> None:
    from fivefold.report import drawn_steps
    from fivefold.report.figures import undrawable

    refuse(undrawable(png))
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
    words: str | None,
    device: Literal["cpu", "cuda"] | None,
    seconds: float,
    png: str | None,
    as_json: bool,
) -> None:
    import torch

    from fivefold.bench.asked import unmeasurable
    from fivefold.bench.collectives import SIZES, check, measure, sizes_in
    from fivefold.report import collectives as told
    from fivefold.report.figures import undrawable

    sizes = SIZES if words is None else sizes_in(words)
    kind = device or ("cuda" if 1 < ranks <= torch.cuda.device_count() else "cpu")
    refuse([*check(ranks, kind, operation, sizes), *unmeasurable(seconds), *undrawable(png)])
    timed = measure(ranks, kind, operation, seconds, sizes)
    backend = timed[0].case.algorithm
    title = f"{ranks} ranks over {backend}"
    if png is not None:
        told.picture(timed, title, png)
    if as_json:
        print_json(told.as_json(timed, backend) | {"png": png})
        return
    print(f"{title}\n")
    print_table(told.HEADER, told.rows(timed))
    if fits := told.fits(timed):
        print("\ntime = latency + bytes / bandwidth\n")
        print_table(told.FIT_HEADER, fits)
