"""A run's checkpoint as a Hugging Face folder.

Everything is written beside its place and moved there when it is whole, `config.json` last: without it the
folder is no model to `transformers`, so a crash at any moment leaves nothing that looks whole and is not.
"""

import json
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.config import Job, job_with
from fivefold.interchange.config import TORCH_NAMES, config_of
from fivefold.interchange.files import INDEX
from fivefold.interchange.kept import CONFIG, FOLDER, GENERATION, kept_config, kept_dtypes
from fivefold.interchange.names import links, their_shapes
from fivefold.interchange.tokenizer import write_tokenizer
from fivefold.interchange.write import Weights, write_weights
from fivefold.models.huggingface import Config
from fivefold.problems import BadInput, BadNews, Problem
from fivefold.storage.folder import durable, folder_of, saved_steps, sync_folder, verified
from fivefold.storage.manifest import DamagedError, Manifest

DTYPES = {"fp64": "F64", "fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""As a job names them -> as the format does."""
PARTIAL = ".partial"
STALE = ("model.safetensors", "model-*-of-*.safetensors", INDEX)


@dataclass(frozen=True)
class Exported:
    """What was written: the step, the files and their bytes, the dtypes, and what a user should know."""

    step: int
    family: str
    dtypes: list[str]
    tensors: int
    bytes: int
    files: list[str]
    notes: list[str]


def export(
    run: Path,
    out: Path,
    step: int | None = None,
    average: bool = False,
    dtype: str | None = None,
    shard_bytes: int = 5 * 10**9,
    force: bool = False,
) -> Exported:
    """Write a checkpoint of `run` to `out`. Raises `BadInput`, and `BadNews` where the disk is full.

    step     which checkpoint; by default the newest
    average  the averaged weights in place of the last ones
    dtype    of every tensor; by default that in which it came, else what the run computes in
    force    write into a folder that holds something: its weights and config are replaced, the rest stays
    """
    _refuse_occupied(out, force)
    folder, manifest = _checkpoint(run, step)
    job = _job_of(manifest, folder)
    kept = kept_config(run)
    config = config_of(job.spec, kept)
    family = str(config["model_type"])
    found = links(job.spec, family)
    usual = DTYPES[dtype or job.training.precision or "fp32"]
    dtypes = dict.fromkeys(their_shapes(found), usual)
    if dtype is None:
        dtypes |= {name: kind for name, kind in kept_dtypes(run).items() if name in dtypes}
    ours = {link.ours: _stored_name(link.ours, manifest, average, run) for link in found}
    weights = Weights(folder, manifest, ours, found, dtypes)
    config = _with_dtype(config, dtypes)
    with _writing(out, weights.bytes) as partial:
        end, tokenizer = write_tokenizer(job.data.tokenizer, job.spec.vocab_size, run, partial)
        if config.get("eos_token_id") is None and kept is None:
            config["eos_token_id"] = end
        files = write_weights(weights, partial, shard_bytes)
        _write_json(partial / GENERATION, _generation(config, run))
        _write_json(partial / CONFIG, config)
        files = [*files, *tokenizer, GENERATION, CONFIG]
        _move(partial, out, files)
    notes = _notes(manifest, weights, job, bool(tokenizer))
    return Exported(
        manifest.step, family, sorted(set(dtypes.values())), len(dtypes), weights.bytes, files, notes
    )


def _refuse_occupied(out: Path, force: bool) -> None:
    hint = "Name another folder, or give --force: its weights and config are replaced, the rest stays."
    try:
        if out.exists() and not out.is_dir():
            raise BadInput([Problem("OUT", f"'{out}' is a file", "Name a folder.")])
        if not force and out.is_dir() and any(out.iterdir()):
            raise BadInput([Problem("OUT", f"'{out}' is not empty", hint)])
    except OSError as error:
        raise BadInput([Problem("OUT", f"'{out}' cannot be read: {error.strerror}")]) from None


def _checkpoint(run: Path, step: int | None) -> tuple[Path, Manifest]:
    """The checkpoint to be written, all of whose files are what was written."""
    if not run.is_dir():
        raise BadInput([Problem("RUN", f"'{run}' is not a folder", "Give a run's folder: runs/NAME.")])
    steps = saved_steps(run)
    if not steps:
        raise BadNews(f"{run} has no checkpoint.")
    if step is not None and step not in steps:
        hint = f"There are those of step {', '.join(map(str, steps))}."
        raise BadInput([Problem("--step", f"{run} has no checkpoint of step {step}", hint)])
    folder = folder_of(run, steps[-1] if step is None else step)
    try:
        return folder, verified(folder)
    except DamagedError as error:
        others = ", ".join(str(each) for each in steps if folder_of(run, each) != folder)
        hint = f"There are others, of step {others}: --step." if others else ""
        raise BadInput([Problem(str(folder), f"is damaged: {error}", hint)]) from None


def _job_of(manifest: Manifest, folder: Path) -> Job:
    """The job that a checkpoint was written by. A user's own model is refused before it is imported."""
    try:
        tree = tomllib.loads(manifest.job)
    except ValueError as error:
        raise BadInput([Problem(str(folder), f"its job cannot be read: {error}")]) from None
    model = tree.get("model")
    if isinstance(model, dict) and model.get("module"):
        message = f"was trained with a model of your own ({model['module']})"
        raise BadInput([Problem(str(folder), message, "No family of transformers has it.")])
    return job_with(tree)


def _stored_name(ours: str, manifest: Manifest, average: bool, run: Path) -> str:
    name = f"optimizer.{ours}.ema" if average else f"model.{ours}"
    if name in manifest.tensors:
        return name
    if average:
        hint = "Train with optimizer.ema to have one, or leave --ema out."
        raise BadInput([Problem("--ema", f"step {manifest.step} of {run} holds no averaged weights", hint)])
    raise BadInput([Problem(str(run), f"step {manifest.step} does not hold '{ours}'")])


def _with_dtype(config: Config, dtypes: dict[str, str]) -> Config:
    """The config with the dtype that most of the tensors have, under the name that it has for it."""
    kinds = list(dtypes.values())
    usual = TORCH_NAMES[max(sorted(set(kinds)), key=kinds.count)]
    return config | {"dtype" if "dtype" in config else "torch_dtype": usual}


def _generation(config: Config, run: Path) -> Config:
    """The generation config that the weights came with, or one with the ids that end and begin a text."""
    kept = run / FOLDER / GENERATION
    try:
        found: Any = json.loads(kept.read_bytes()) if kept.is_file() else None
    except (OSError, ValueError) as error:
        raise BadInput([Problem(str(kept), f"cannot be read: {error}", "Remove it.")]) from None
    if isinstance(found, dict):
        return found
    ids = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"_from_model_config": True} | {key: value for key, value in ids.items() if value is not None}


def _notes(manifest: Manifest, weights: Weights, job: Job, tokenizer: bool) -> list[str]:
    notes = []
    if not tokenizer:
        notes.append(f"no tokenizer was written: '{job.data.tokenizer}' is not kept with the run.")
    if job.training.balance == "bias" and weights.moved_biases():
        notes.append(
            "training.balance = 'bias' has moved which experts are chosen, and the family has no place for "
            "it: tokens may go to other experts than in training."
        )
    return notes


def _write_json(path: Path, content: Config) -> None:
    durable(path, (json.dumps(content, indent=2) + "\n").encode())


@contextmanager
def _writing(out: Path, needed: int) -> Iterator[Path]:
    """A folder in `out` to write into. Afterwards it is gone, and so is an `out` made for nothing."""
    partial, made = out / PARTIAL, not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
    except OSError as error:
        free = shutil.disk_usage(next(p for p in (out, *out.absolute().parents) if p.exists())).free
        if free < needed:
            message = f"{out} cannot be written: {needed:,} bytes are needed and {free:,} are free."
            raise BadNews(message) from None
        raise BadInput([Problem("OUT", f"'{out}' cannot be written: {error.strerror}")]) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made and out.is_dir() and not any(out.iterdir()):
            out.rmdir()


def _move(partial: Path, out: Path, files: list[str]) -> None:
    """Put files in their place. The old model goes first; `config.json`, the last of `files`, comes last."""
    for old in [out / CONFIG, *(path for pattern in STALE for path in out.glob(pattern))]:
        old.unlink(missing_ok=True)
    for name in files:
        (partial / name).rename(out / name)
    sync_folder(out)
