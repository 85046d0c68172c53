"""What a run starts from that is not made here: `model.weights`, checked and kept before any rank starts."""

import sys
from pathlib import Path

from fivefold.config import Job
from fivefold.interchange.kept import has_tokenizer, keep
from fivefold.interchange.read import TheirWeights
from fivefold.problems import BadInput, Problem
from fivefold.storage.folder import saved_steps


def without_weights(job: Job) -> Job:
    """The job of a run that goes on: its checkpoint has the weights, wherever they once came from."""
    return job.model_copy(update={"model": job.model.model_copy(update={"weights": None})})


def check_weights(job: Job, folder: Path | None) -> list[Problem]:
    """Why a resolved job cannot start from `model.weights`; a folder with a checkpoint goes before them."""
    if job.model.weights is None or (folder is not None and saved_steps(folder)):
        return []
    try:
        TheirWeights(Path(job.model.weights), job.spec)
    except BadInput as error:
        return error.problems
    return []


def keep_start(job: Job, folder: Path) -> None:
    """Keep with a new run what belongs to its weights, so that it can be written out with them again."""
    if job.model.weights is not None and not saved_steps(folder):
        source = Path(job.model.weights)
        keep(source, folder, TheirWeights(source, job.spec).dtypes())


def say_unheeded(job: Job) -> None:
    """Say on stderr what the config of a job's model asks of training, and does not get."""
    for sentence in job.model.unheeded():
        print(sentence, file=sys.stderr)
    weights = job.model.weights
    if weights is None or "tokenizer" in job.data.model_fields_set:
        return
    if not has_tokenizer(Path(weights).expanduser()):
        print(f"{weights} has no tokenizer.json: data.tokenizer is '{job.data.tokenizer}'.", file=sys.stderr)
