"""The checkpoints of a run: which there are, which are whole, and how one more is made.

    RUN/checkpoints/step-100/          one that was committed
    RUN/checkpoints/step-200.partial/  one that is being written, or was when the run ended
    RUN/checkpoints/latest             the name of the newest, for people and scripts

A checkpoint is written under the other name and renamed when all of it is on the disk: a crash at any moment
leaves those before it as they were, and the next save clears what it left.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from fivefold.problems import BadInput, Problem
from fivefold.storage.manifest import (
    COMMIT,
    MANIFEST,
    PREFIX,
    DamagedError,
    File,
    Manifest,
    commit_text,
    manifest_text,
    read_manifest,
)
from fivefold.storage.safetensors import file_checksum

LATEST, PARTIAL = "latest", ".partial"
STILL_S = 60.0
"""A save none of whose files has changed for so long is not under way."""


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"{PREFIX}{step}"


def partial_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"{PREFIX}{step}{PARTIAL}"


def saved_steps(run: Path) -> list[int]:
    """Steps of the checkpoints of a run that were committed, oldest first.

    Raises `BadInput` where they cannot be listed: that must not look like a run without any.
    """
    folder = run / "checkpoints"
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        hint = "Mend it, or name another folder with --run."
        raise BadInput(
            [Problem("run.folder", f"'{folder}' cannot be read: {error.strerror}", hint)]
        ) from None
    names = (name.removeprefix(PREFIX) for name in entries if name.startswith(PREFIX))
    return sorted(int(name) for name in names if name.isdecimal())


def begin(run: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into; whatever earlier writing left over is removed."""
    clear_partial(run)
    partial = partial_of(run, step)
    partial.mkdir(parents=True)
    return partial


def clear_partial(run: Path) -> None:
    """Remove what saves that did not end have left."""
    for left in (run / "checkpoints").glob(f"{PREFIX}*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)


def commit(run: Path, manifest: Manifest) -> Path:
    """Make a checkpoint of the folder that `begin` gave, when all its files are written."""
    partial, final = partial_of(run, manifest.step), folder_of(run, manifest.step)
    text = manifest_text(manifest)
    durable(partial / MANIFEST, text)
    durable(partial / COMMIT, commit_text(text))
    sync_folder(partial)
    if final.exists():  # the same step once more, after an older checkpoint was taken up
        replaced = final.with_name(f"{final.name}.replaced{PARTIAL}")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        partial.rename(final)
    sync_folder(final.parent)
    point_to(final)
    return final


def point_to(final: Path) -> None:
    """Let `latest` name this checkpoint."""
    replaced(final.parent / LATEST, f"{final.name}\n".encode())


def prune(run: Path, keep: int, keep_every: int = 0) -> list[int]:
    """Remove all but the newest `keep` and those of every `keep_every`th step; returns the steps removed."""
    gone = [step for step in saved_steps(run)[: -keep or None] if not (keep_every and step % keep_every == 0)]
    remove(run, gone)
    return gone


def remove(run: Path, steps: Iterable[int]) -> None:
    """Remove the checkpoints of some steps: renamed first, so that no half of one is left under its name."""
    for step in steps:
        doomed = folder_of(run, step).rename(partial_of(run, step))
        shutil.rmtree(doomed, ignore_errors=True)


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files are what was written. Raises `DamagedError`."""
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        if wrong := damage(folder / name, file):
            raise DamagedError(wrong)
    return manifest


def damage(path: Path, file: File) -> str | None:
    """What is wrong with a file; None when it is as it was written."""
    try:
        size = path.stat().st_size
        if size != file.bytes:
            return f"{path.name} has {size:,} bytes, not {file.bytes:,}"
        if file_checksum(path) != file.checksum:
            return f"{path.name} is not what was written: its checksum is another one"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None


def newest_first(run: Path) -> Iterator[Path]:
    """The folders of a run's checkpoints."""
    return (folder_of(run, step) for step in reversed(saved_steps(run)))


def replaced(path: Path, content: bytes) -> None:
    """Write a small file whole: a crash leaves the one before it, or this one."""
    new = path.with_name(f"{path.name}{PARTIAL}")
    durable(new, content)
    new.rename(path)
    sync_folder(path.parent)


def being_written(run: Path) -> bool:
    """Whether a checkpoint is on its way to the disk, by the times at which its files last changed."""
    newest = 0.0
    for partial in (run / "checkpoints").glob(f"{PREFIX}*{PARTIAL}"):
        with suppress(OSError):
            newest = max(newest, *(path.stat().st_mtime for path in (partial, *partial.iterdir())))
    return time.time() - newest < STILL_S


def durable(path: Path, content: bytes) -> None:
    """Write a small file and bring it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
