"""`fivefold simulate`"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.commands.common import AsJson, Preset, Words, print_json, read_job, reporting, say_unheeded
from fivefold.problems import BadInput, Problem, refuse, unwritable

if TYPE_CHECKING:
    from fivefold.report.shown import Shown


def simulate(
    words: Words = None,
    preset: Preset = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Without a job: a pipeline schedule, such as 1f1b, interleaved, zbv, zb-h1."),
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Its ranks.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches in a step.")] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Stages that a rank holds. Default: 1, or 2 where the schedule loops.")
    ] = None,
    forward: Annotated[
        str | None,
        typer.Option(help="Milliseconds of a rank for one micro-batch; or of each stage: 3,3,3.5,4."),
    ] = None,
    backward_input: Annotated[str | None, typer.Option(help="Likewise: gradients of inputs.")] = None,
    backward_weight: Annotated[str | None, typer.Option(help="Likewise: gradients of weights.")] = None,
    transfer: Annotated[
        float | None, typer.Option(help="Milliseconds from one stage to the next. Default: 0.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="A job's cluster: a name, or a file. Default: what the job says, or dgx-h100."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="A job's devices. Default: what its layout says.")] = None,
    run: Annotated[
        bool, typer.Option("--run", help="The whole training of a job, with failures and checkpoints.")
    ] = False,
    failures_per_gpu_hour: Annotated[
        float | None, typer.Option(help="With --run. Default: Llama 3's 466 in 54 days on 16,384 GPUs.")
    ] = None,
    checkpoint_seconds: Annotated[
        float | None, typer.Option(help="With --run: how long training waits. Default: by the model's size.")
    ] = None,
    restart_seconds: Annotated[
        float | None, typer.Option(help="With --run: from a failure to the next step. Default: 600.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="With --run: of one GPU-hour. Gives the cost.")] = None,
    png: Annotated[str | None, typer.Option(help="Draw the timeline into this file.")] = None,
    trace: Annotated[str | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play a step on a timeline: who computes when, who waits, and what is kept in memory.

    Of a job, on a cluster; or of a pipeline schedule alone, with times of your own. There `bubble` is
    1 - m(F+B+W)/T, with T the longest any rank is busy, from its first start to its last end. `--run` goes
    through the whole training: failures, checkpoints, restarts, days and cost.

    \b
    Examples:
      fivefold simulate job.toml --cluster dgx-h100 --png step.png --trace step.json
      fivefold simulate --preset llama3-8b --gpus 64 --layout.pp 4 --training.global_batch 512
      fivefold simulate job.toml --run --price 2
      fivefold simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward 10 \\
          --backward-input 10 --backward-weight 8
      fivefold simulate --schedule zb-h2 --stages 8 --micro-batches 24 --forward 18.5 \\
          --backward-input 18.1 --backward-weight 9.3 --transfer 0.6 --json
    """
    with reporting(as_json):
        from fivefold.config import sort_words

        alone = {
            "--stages": stages,
            "--micro-batches": micro_batches,
            "--virtual-stages": virtual_stages,
            "--forward": forward,
            "--backward-input": backward_input,
            "--backward-weight": backward_weight,
            "--transfer": transfer,
        }
        whole = {
            "--failures-per-gpu-hour": failures_per_gpu_hour,
            "--checkpoint-seconds": checkpoint_seconds,
            "--restart-seconds": restart_seconds,
            "--price": price,
        }
        sort_words(
            words or [], (*alone, *whole, "--schedule", "--cluster", "--gpus", "--run", "--png", "--trace")
        )
        refuse([*unwritable(png, "--png"), *unwritable(trace, "--trace")])
        of_job = {"--cluster": cluster, "--gpus": gpus, "--run": run or None, "--preset": preset, **whole}
        if schedule is not None:
            _refuse(of_job | dict.fromkeys(words or []), "belongs to a job, not to --schedule")
            from fivefold.report.simulated_schedule import schedule_shown

            shown = schedule_shown(schedule, alone)
        else:
            _refuse(alone, "is for a schedule without a job", "Give --schedule, or a job's own settings.")
            if not run:
                _refuse(whole, "is for a whole training", "Add --run.")
            from fivefold.report.simulated_job import asked, run_shown, step_shown

            job = read_job(words, preset)
            say_unheeded(job)
            question = asked(job, cluster, gpus)
            shown = step_shown(question)
        told = dict(shown.figures) | _written(shown, png, trace)
        if not as_json:
            _show(shown)
        if run:
            text, told["run"] = run_shown(
                question, shown, failures_per_gpu_hour, checkpoint_seconds, restart_seconds, price
            )
            if not as_json:
                print(f"\n{text}")
        if as_json:
            print_json(told)


def _refuse(options: Mapping[str, object], message: str, hint: str = "Leave it out.") -> None:
    given = [option for option, value in options.items() if value is not None or not option.startswith("--")]
    if given:
        raise BadInput([Problem(option, message, hint) for option in given])


def _written(shown: Shown, png: str | None, trace: str | None) -> dict[str, str]:
    """Write what was asked for; returns where it is."""
    written = {}
    if png is not None:
        from fivefold.report.timeline_picture import draw

        draw(shown, png)
        written["png"] = png
    if trace is not None:
        from fivefold.report.timeline import write_trace

        write_trace(shown, trace)
        written["trace"] = trace
    return written


def _show(shown: Shown) -> None:
    from shutil import get_terminal_size

    from fivefold.report.timeline import as_text

    terminal = sys.stdout.isatty()
    width = get_terminal_size().columns if terminal else 160
    print(shown.title)
    print(as_text(shown, width, colours=terminal))
    print(shown.summary)
