"""A Hugging Face folder as a new run: its weights as a checkpoint of step 0, its tokenizer, and a job."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fivefold.config import Data, Job, Model, Run, dump_toml
from fivefold.interchange.kept import has_tokenizer, keep
from fivefold.interchange.read import TheirWeights
from fivefold.interchange.start import write_start
from fivefold.models.huggingface import model_type, read_config, unheeded
from fivefold.models.inventory import parameter_count
from fivefold.problems import BadInput, Problem
from fivefold.storage.folder import clear_partial, saved_steps
from fivefold.storage.lock import locked
from fivefold.storage.manifest import read_manifest
from fivefold.version import __version__


@dataclass(frozen=True)
class Brought:
    """What a run now holds, and what a user should know of it."""

    family: str
    parameters: int
    tensors: int
    dtypes: list[str]
    bytes: int
    tokenizer: str | None
    notes: list[str]


def bring_in(folder: Path, run: Path) -> Brought:
    """Make a run of a folder. Raises `BadInput` with all that is wrong, before anything is written."""
    spec = read_config(folder, "FOLDER")
    weights = TheirWeights(folder, spec)
    try:
        run.mkdir(parents=True, exist_ok=True)
        with locked(run):
            return _written(folder, run.resolve(), weights)
    except OSError as error:
        clear_partial(run)
        message = f"'{error.filename or run}' cannot be written: {error.strerror}"
        raise BadInput([Problem("--run", message, "Name another folder.")]) from None


def _written(folder: Path, run: Path, weights: TheirWeights) -> Brought:
    if steps := saved_steps(run):
        message = f"'{run}' holds checkpoints already, the newest of step {steps[-1]}"
        raise BadInput([Problem("--run", message, "Name another folder.")])
    spec = read_config(folder, "FOLDER")
    dtypes = weights.dtypes()
    kept = keep(folder, run, dtypes)
    model = Model.model_validate(spec.model_dump(exclude_unset=True, exclude_none=True))
    tokenizer = str(kept) if has_tokenizer(kept) else None
    job = Job(model=model, data=Data(tokenizer=tokenizer) if tokenizer else Data(), run=Run(folder=str(run)))
    text = dump_toml(job)
    versions = {"fivefold": __version__, "torch": torch.__version__}
    manifest = read_manifest(write_start(weights, spec, run, versions, text))
    (run / "job.toml").write_text(text)
    notes = unheeded(folder)
    if tokenizer is None:
        notes.append(
            f"{folder} has no tokenizer.json: data.tokenizer is '{job.data.tokenizer}' until it is set."
        )
    return Brought(
        model_type(folder),
        parameter_count(spec),
        len(dtypes),
        sorted(set(dtypes.values())),
        manifest.size,
        tokenizer,
        notes,
    )
