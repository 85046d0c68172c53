"""`fivefold checkpoint`: what can be done with the checkpoints of a run. None of it needs a GPU."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.commands.common import SETTINGS, AsJson, print_json, print_table, reporting
from fivefold.commands.huggingface import export_hf, import_hf
from fivefold.commands.reshard import reshard
from fivefold.problems import BadInput, BadNews, Problem

checkpoint = typer.Typer(
    help="The checkpoints of a run: list, verify, remove, reshard; Hugging Face folders in and out.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

checkpoint.command("import-hf")(import_hf)
checkpoint.command("export-hf")(export_hf)
checkpoint.command(context_settings=SETTINGS)(reshard)

RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)]
GIB = 2**30


@checkpoint.command()
def ls(run: RunFolder, as_json: AsJson = False) -> None:
    """List the checkpoints of a run: step, size, tensors, files and loss.

    Their files are not read: `fivefold checkpoint verify` does that.

    \b
    Example:
      fivefold checkpoint ls runs/tiny
    """
    with reporting(as_json):
        found = [_listed(folder) for folder in _folders(run)]
        if as_json:
            print_json({"run": run, "checkpoints": found})
            return
        rows = [[f"step {each['step']}", *_cells(each)] for each in found]
        print_table(["", "GiB", "tensors", "files", "loss", ""], rows)


@checkpoint.command()
def verify(
    run: RunFolder,
    step: Annotated[int | None, typer.Option(help="Only the checkpoint of this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every file of a run's checkpoints and compare it with what was written.

    Exit code 1 where any is damaged: `train` would pass over it, to the newest one that is not.

    \b
    Example:
      fivefold checkpoint verify runs/tiny --step 100
    """
    with reporting(as_json):
        from fivefold.storage.folder import folder_of, verified
        from fivefold.storage.manifest import DamagedError

        folders = _folders(run)
        if step is not None:
            folders = [folder for folder in folders if folder == folder_of(Path(run), step)]
            if not folders:
                hint = "`fivefold checkpoint ls` lists those there are."
                raise BadInput([Problem("--step", f"{run} has no checkpoint of step {step}", hint)])
        problems: dict[str, str | None] = {}
        for folder in folders:
            try:
                verified(folder)
                problems[folder.name] = None
            except DamagedError as error:
                problems[folder.name] = str(error)
            if not as_json:
                print(f"{folder.name}: {problems[folder.name] or 'whole'}")
        damaged = {name: problem for name, problem in problems.items() if problem}
        if as_json:
            print_json({"run": run, "damaged": damaged, "whole": sorted(problems.keys() - damaged.keys())})
        if damaged:
            raise typer.Exit(1)


@checkpoint.command()
def prune(
    run: RunFolder,
    keep: Annotated[int, typer.Option(help="How many of the newest stay.")] = 2,
    keep_every: Annotated[int, typer.Option(help="Those of every so many steps stay too.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Remove all checkpoints of a run but the newest, and what interrupted saves have left.

    \b
    Example:
      fivefold checkpoint prune runs/tiny --keep 1
    """
    with reporting(as_json):
        from fivefold.storage.folder import clear_partial, prune
        from fivefold.storage.lock import locked

        if keep < 1 or keep_every < 0:
            key, value = ("--keep", keep) if keep < 1 else ("--keep-every", keep_every)
            raise BadInput([Problem(key, f"{value} is out of range", "At least one checkpoint stays.")])
        _folders(run)
        with locked(Path(run)):
            clear_partial(Path(run))
            gone = prune(Path(run), keep, keep_every)
        if as_json:
            print_json({"run": run, "removed": gone})
        else:
            print("removed: " + (", ".join(f"step {step}" for step in gone) or "nothing"))


def _folders(run: str) -> list[Path]:
    """The folders of a run's checkpoints, oldest first. Raises `BadInput` where there are none."""
    from fivefold.storage.folder import newest_first

    if not Path(run).is_dir():
        raise BadInput([Problem("RUN", f"'{run}' is not a folder", "Give a run's folder: runs/NAME.")])
    found = list(newest_first(Path(run)))[::-1]
    if not found:
        raise BadNews(f"{run} has no checkpoint.")
    return found


def _listed(folder: Path) -> dict[str, Any]:
    from fivefold.storage.manifest import DamagedError, read_manifest

    step = int(folder.name.rpartition("-")[2])
    try:
        manifest = read_manifest(folder)
    except DamagedError as error:
        return {"step": step, "damaged": str(error)}
    return {
        "step": step,
        "bytes": manifest.size,
        "tensors": len(manifest.tensors),
        "files": len(manifest.files),
        "loss": manifest.progress.get("loss"),
        "versions": manifest.versions,
    }


def _cells(each: dict[str, Any]) -> list[str]:
    if "damaged" in each:
        return ["", "", "", "", f"damaged: {each['damaged']}"]
    figures = [f"{each['bytes'] / GIB:.3f}", f"{each['tensors']:,}", f"{each['files']:,}"]
    return [*figures, f"{each['loss']:.4f}" if each["loss"] is not None else "", ""]
