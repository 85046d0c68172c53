"""`fivefold plan`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.common import AsJson, Keys, print_json, print_table, reporting, say_unheeded
from fivefold.problems import BadInput, Problem, refuse, unwritable

if TYPE_CHECKING:
    from fivefold.planner.answer import Answer

OPTIONS = (
    *("--model", "--hf", "--cluster", "--gpus", "--seq-len", "--global-batch", "--tokens", "--price"),
    *(
        "--deadline",
        "--precision",
        "--compile",
        "--no-compile",
        "--why",
        "--recipe",
        "--allow",
        "--out",
        "--json",
    ),
)
"""For hints where one is misspelt."""


def plan(
    words: Keys = None,
    model: Annotated[str | None, typer.Option(help="A built-in model; `fivefold models` lists them.")] = None,
    hf: Annotated[str | None, typer.Option(help="In place of --model: a Hugging Face config.json.")] = None,
    cluster: Annotated[
        str, typer.Option(help="A built-in cluster, or a file that `fivefold probe` wrote.")
    ] = "dgx-h100",
    gpus: Annotated[
        str, typer.Option(help="How many devices; `auto` with --deadline: as few as make it.")
    ] = "8",
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence. Default: 8192, or the model's longest.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Sequences in a step. Default: about 4M tokens, at least 1024 a device."),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, such as 15T: gives days.")] = None,
    price: Annotated[float | None, typer.Option(help="Of one device for one hour: gives the cost.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Days that training may take.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32, fp64. Default: bf16 on a GPU, fp32 on a CPU.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Blocks compiled by torch, or not. Default: what is faster."
        ),
    ] = None,
    why: Annotated[
        str | None, typer.Option(help="Why not this layout? Some of its keys: tp=8,pp=4,zero=1")
    ] = None,
    recipe: Annotated[
        bool, typer.Option("--recipe", help="The usual rules of thumb, each beside what the search says.")
    ] = False,
    allow: Annotated[
        str | None,
        typer.Option(help="Settings that change the numbers and may be used where they pay: int8,local"),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write the best layout as a job file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best layout before anything runs: memory, time, MFU, days and money.

    Every layout that the axes allow is bounded. What could be among the best is played: its step by a
    timeline of every computation and message, its memory by the tensors that are alive. What is given of a
    job, such as --layout.tp 8, every layout has; the rest is searched for. Exit code 1: no layout fits, or
    none makes the deadline.

    \b
    Examples:
      fivefold plan --model llama3-8b --gpus 64
      fivefold plan --model llama3-405b --gpus 16384 --tokens 15.6T --price 2
      fivefold plan --model llama3-70b --gpus 256 --why tp=8,pp=4
      fivefold plan --model llama3-70b --gpus 256 --layout.tp 8 --training.recompute full --optimizer.name sgd
      fivefold plan --model llama3-8b --gpus 64 --model.max_seq_len 32768 --seq-len 32768
      fivefold plan --model llama3-8b --gpus auto --tokens 1T --deadline 14
      fivefold plan --model llama3-8b --gpus 64 --cluster ethernet.toml --allow int8,local
      fivefold plan --model tiny --cluster cluster.toml --gpus 4 --out job.toml
    """
    with reporting(as_json):
        from fivefold.config import dump_toml, settings_in
        from fivefold.planner.allowed import fastest
        from fivefold.planner.request import Request

        refuse(unwritable(out, "--out"))
        request = Request(
            model=model,
            hf=hf,
            cluster=cluster,
            gpus=gpus,
            seq_len=seq_len,
            global_batch=global_batch,
            tokens=tokens,
            price=price,
            deadline=deadline,
            precision=precision,
            compile=compiled,
            why=why,
            allow=allow,
            keys=settings_in(words or [], OPTIONS),
        )
        say_unheeded(request.asked)
        if recipe and request.fixed:
            message = f"its rules choose {', '.join(request.fixed)} themselves"
            raise BadInput([Problem("--recipe", message, "Leave out --recipe, or the keys that are fixed.")])
        answer = request.answer()
        told = answer.as_json()
        variants = request.allowed(answer)
        written, settings = fastest(answer, variants)
        if out is not None and written.best is not None:
            Path(out).write_text(dump_toml(request.job(written, settings)))
            told["out"] = out
        if not as_json:
            _show(answer)
        if variants:
            told["allowed"] = {variant.name: variant.as_json() for variant in variants}
            if not as_json:
                print("\nwhat changes the numbers, and is allowed")
                for variant in variants:
                    print(f"  {variant.sentence(answer)}")
        if why is not None:
            from fivefold.planner.why import why as explain

            reason = explain(request.given, answer)
            told["why"] = {"sentence": reason.sentence, "remedies": reason.remedies} | reason.figures
            told["why"]["verdict"] = reason.verdict
            if not as_json:
                print(f"\n{reason}")
        if recipe:
            told["recipe"] = _recipe(answer, as_json)
        if answer.best is None:
            told["nearest"] = request.nearest(answer)
            if not as_json:
                print(told["nearest"]["sentence"])
        elif out is not None and not as_json:
            print(f"\nwritten: {out}    fivefold train {out}")
        late = request.late(answer)
        if late:
            told["late"] = late
            if not as_json:
                print(late)
        if as_json:
            print_json(told)
        if answer.best is None or late:
            raise typer.Exit(1)


def _show(answer: Answer) -> None:
    from fivefold.planner.answer import MFU_CONVENTION
    from fivefold.report.plan_text import columns, spent, title

    searched = answer.searched
    print(title(answer))
    print(
        f"searched {searched.bounded:,} layouts, played {searched.played:,} of them, "
        f"in {searched.seconds:.1f} s"
    )
    if not searched.best:
        return
    print("\nfastest")
    print_table(*columns(answer, searched.best))
    print(spent(searched.best[0]))
    if len(searched.front) > 1:
        print("\nless memory, at what price (Pareto front)")
        print_table(*columns(answer, searched.front))
    print(f"\nMFU: {MFU_CONVENTION}.")
    if answer.tokens is not None:
        print("Days are of training alone; `fivefold simulate JOB --run` counts failures and checkpoints.")


def _recipe(answer: Answer, as_json: bool) -> list[dict[str, Any]]:
    from fivefold.planner.recipe import chosen_by_recipe, recipe

    steps = recipe(answer)
    if not as_json:
        print("\nthe usual recipe")
        for number, step in enumerate(steps, start=1):
            print(f"{number}. {step.rule.advice}")
            print(f"   {'applies here' if step.asked else 'not asked for here'}. Search: {step.says(answer)}")
            if step.searched.best:
                print(f"   {step.searched.best[0].keys}")
        end = chosen_by_recipe(steps)
        if end is not None:
            print(f"The recipe ends at rule {steps.index(end) + 1}: {end.says(answer)}.")
    return [step.as_json(answer) for step in steps]
