"""`fivefold plan`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.common import AsJson, print_json, print_table, reporting
from fivefold.problems import refuse, unwritable

if TYPE_CHECKING:
    from fivefold.planner.plan import Plan
    from fivefold.planner.search import Planned


def plan(
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
        str | None, typer.Option(help="bf16, fp16, fp32, fp64. Default: bf16 where the device has it.")
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
    out: Annotated[str | None, typer.Option(help="Write the best layout as a job file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best layout before anything runs: memory, time, MFU, days and money.

    Every layout that the axes allow is bounded, the promising ones are computed from the same ledger that the
    training program is tested against, and the best are simulated. Exit code 1: no layout fits, or none
    makes the deadline.

    \b
    Examples:
      fivefold plan --model llama3-8b --gpus 64
      fivefold plan --model llama3-405b --gpus 16384 --tokens 15.6T --price 2
      fivefold plan --model llama3-70b --gpus 256 --why tp=8,pp=4
      fivefold plan --model llama3-8b --gpus auto --tokens 1T --deadline 14
      fivefold plan --model tiny --cluster cluster.toml --gpus 4 --out job.toml
    """
    with reporting(as_json):
        from fivefold.planner.request import Request

        refuse(unwritable(out, "--out"))
        request = Request.read(
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
        )
        found = request.plan()
        told = found.as_json()
        if out is not None and found.best is not None:
            Path(out).write_text(request.job_file(found))
            told["out"] = out
        if not as_json:
            _show(found)
        if why is not None:
            from fivefold.planner.why import why as explain

            reason = explain(request.given, found)
            told["why"] = {"sentence": reason.sentence, "remedies": reason.remedies} | reason.figures
            told["why"]["verdict"] = reason.verdict
            if not as_json:
                print(f"\n{reason}")
        if recipe:
            told["recipe"] = _recipe(found, as_json)
        if found.best is None:
            told["nearest"] = request.nearest(found)
            if not as_json:
                print(told["nearest"]["sentence"])
        elif out is not None and not as_json:
            print(f"\nwritten: {out}    fivefold train {out}")
        late = request.late(found)
        if late:
            told["late"] = late
            if not as_json:
                print(late)
        if as_json:
            print_json(told)
        if found.best is None or late:
            raise typer.Exit(1)


def _show(found: Plan) -> None:
    goal = found.goal
    print(
        f"{goal.spec.name} on {goal.gpus:,} x {found.cluster.device.name} ({found.cluster.name}), "
        f"{goal.global_batch:,} sequences of {goal.seq_len:,} tokens, {goal.precision.name}"
    )
    print(
        f"searched {found.found.searched:,} layouts, ruled out {found.found.pruned:,} by bounds, "
        f"in {found.found.seconds:.1f} s"
    )
    if not found.found.best:
        return
    print("\nfastest")
    _table(found, found.found.best)
    if len(found.found.front) > 1:
        print("\nless memory, at what price (Pareto front)")
        _table(found, found.found.front)
    from fivefold.planner.plan import MFU_CONVENTION

    print(f"\nMFU: {MFU_CONVENTION}.")
    if found.tokens is not None:
        print("Days are of training alone; `fivefold simulate JOB --run` counts failures and checkpoints.")


def _table(found: Plan, lines: list[Planned]) -> None:
    header = ["layout", "step", "tok/s/GPU", "MFU", "GiB"]
    costs = found.tokens is not None and found.price is not None
    header += ["days"] * (found.tokens is not None) + ["cost"] * costs
    rows = []
    for planned in lines:
        row = found.row(planned)
        cells = [
            layout_words({**row["layout"], **row["training"]}),
            f"{row['step_time_s']:.4g} s",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['memory_gib']:.3g}",
        ]
        if found.tokens is not None:
            cells.append(f"{row['days']:.3g}")
        if costs:
            cells.append(f"{row['cost']:,.0f}")
        rows.append(cells)
    print_table(header, rows)


def layout_words(keys: dict[str, Any]) -> str:
    """A layout in one short line: `dp_shard 64 (zero 3) x tp 8 x pp 4 (1f1b), micro-batch 2`."""
    words = []
    if keys["dp_replicate"] > 1:
        words.append(f"dp_replicate {keys['dp_replicate']}")
    if keys["dp_shard"] > 1 or keys["zero"]:
        words.append(f"dp_shard {keys['dp_shard']} (zero {keys['zero']})")
    if keys["cp"] > 1:
        words.append(f"cp {keys['cp']} ({keys['cp_kind']})")
    words += [f"{axis} {keys[axis]}" for axis in ("tp", "ep") if keys[axis] > 1]
    if keys["pp"] > 1:
        turns = f" x{keys['virtual_stages']}" if keys["virtual_stages"] > 1 else ""
        words.append(f"pp {keys['pp']} ({keys['schedule']}{turns})")
    line = " x ".join(words) or "one device"
    line += f", micro-batch {keys['micro_batch']}"
    line += "" if keys["recompute"] == "none" else f", recompute {keys['recompute']}"
    return line + (", compiled" if keys["compile"] else "")


def _recipe(found: Plan, as_json: bool) -> list[dict[str, Any]]:
    from fivefold.planner.recipe import brief_layout, chosen_by_recipe, recipe

    steps = recipe(found)
    if not as_json:
        print("\nthe usual recipe")
        for number, step in enumerate(steps, start=1):
            print(f"{number}. {step.rule.advice}")
            print(f"   {'applies here' if step.asked else 'not asked for here'}. Search: {step.says(found)}")
            if layout := brief_layout(step):
                print(f"   {layout}")
        end = chosen_by_recipe(steps)
        if end is not None:
            print(f"The recipe ends at rule {steps.index(end) + 1}: {end.says(found)}.")
    return [step.as_json(found) for step in steps]
