"""The storage that all machines of a platform share, and the run's folder on it."""

from dataclasses import dataclass
from pathlib import PurePosixPath

from fivefold.config import Job
from fivefold.problems import BadInput, Problem

MOUNT = "/shared"


@dataclass(frozen=True)
class Storage:
    """What the platform calls it, and where the machines see it."""

    name: str
    mount: str


def read_storage(text: str | None) -> Storage:
    """Storage from `NAME` or `NAME:/PATH`. Raises `BadInput`: rank 0 puts checkpoints together from all."""
    name, mount = text or "", MOUNT
    if ":/" in name and not name.endswith("://"):
        before, _, path = name.rpartition(":/")
        if not path.startswith("/"):  # a bucket's address has two slashes
            name, mount = before, f"/{path}"
    if not name:
        hint = f"Name what all machines can write: --storage NAME (seen at {MOUNT}), or NAME:/PATH."
        said = "is not given" if text is None else f"'{text}' has no name"
        raise BadInput([Problem("--storage", said, hint)])
    return Storage(name, mount.rstrip("/") or "/")


def on_storage(job: Job, storage: Storage) -> Job:
    """The job with its run's folder on the storage. Raises `BadInput` where it names another place."""
    folder = PurePosixPath(str(job.run.folder))
    if not folder.is_absolute():
        folder = PurePosixPath(storage.mount) / folder
    elif not folder.is_relative_to(storage.mount):
        hint = f"Use a folder below {storage.mount}, or --storage {storage.name}:/PATH."
        raise BadInput([Problem("run.folder", f"'{folder}' is not on the storage of --storage", hint)])
    return job.model_copy(update={"run": job.run.model_copy(update={"folder": str(folder)})})
