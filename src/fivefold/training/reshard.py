"""A checkpoint arranged for another layout, without ranks or GPUs.

Any checkpoint can be taken up under any layout. One arranged for it has a file for each rank, of what
it keeps, each piece in one run of bytes. What several ranks keep is in the file of one of them.
"""

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from fivefold.axes.checks import check
from fivefold.axes.layout import Layout
from fivefold.axes.slabs import Slab, slabs
from fivefold.config import Job, dump_toml, resolve
from fivefold.models.inventory import parameters
from fivefold.models.own.spec import part_of
from fivefold.problems import BadInput, Problem, refuse
from fivefold.storage.folder import clear_partial, remove, saved_steps
from fivefold.storage.lock import locked
from fivefold.storage.manifest import Manifest, Tensor, file_name
from fivefold.storage.rewrite import Cut, rewrite
from fivefold.storage.safetensors import WIDTHS
from fivefold.training.job_files import keep_jobs
from fivefold.training.tensor_names import parameter_of, replica_of


class Resharded(NamedTuple):
    """The job that the new checkpoint is arranged for, with nothing left open, and what was written."""

    job: Job
    manifest: Manifest


def reshard(source: Path, manifest: Manifest, asked: Job, ranks: int, out: Path) -> Resharded:
    """Write the checkpoint in `source` into the run's folder `out`, as the ranks of a job's layout keep it.

    Checkpoints that `out` has of other steps are removed. Raises `BadInput`, before anything is written; and
    `OSError`.
    """
    refuse(_left_to_the_planner(asked))
    job = resolve(asked, ranks, "cuda")  # the precision is known, and all else goes with GPUs
    refuse([*check(job), *_of_another_model(source, manifest, job)])
    cuts = arranged(job, manifest.tensors)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem("OUT", f"'{out}' cannot be made: {error.strerror}", "Name another folder.")
        raise BadInput([problem]) from None
    with locked(out):
        run = job.run.model_copy(update={"name": None, "folder": str(out.resolve())})
        job = job.model_copy(update={"run": run})
        keep_jobs(out, asked, job)
        try:
            written = rewrite(source, manifest, cuts, dump_toml(job), out)
        except BaseException:
            clear_partial(out)
            raise
        remove(out, [step for step in saved_steps(out) if step != manifest.step])
    return Resharded(job, written)


def arranged(job: Job, tensors: Mapping[str, Tensor]) -> dict[str, list[Cut]]:
    """Every tensor of a checkpoint, cut into what the ranks of a resolved job's layout keep of it.

    Of ranks that keep the same block the one whose file is smallest so far gets it.
    """
    kept, sizes, found = _Kept(job), [0] * Layout.of(job).ranks, dict[str, list[Cut]]()
    for name, tensor in tensors.items():
        found[name] = []
        for block, ranks in kept.blocks(name, tensor).items():
            rank = min(ranks, key=sizes.__getitem__)
            sizes[rank] += prod(block.shape) * WIDTHS[tensor.dtype]
            found[name].append(Cut(*block, file_name(rank)))
    return found


class _Kept:
    """Which ranks keep which slab of each parameter, and which have anything of each part of the model."""

    def __init__(self, job: Job):
        self.shapes = {parameter.name: parameter.shape for parameter in parameters(job.spec)}
        self.slabs: dict[str, dict[Slab, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.parts: dict[str, set[int]] = defaultdict(set)
        self.layout = layout = Layout.of(job)
        self.alone = job.communication.takes_outer_steps
        for rank in range(layout.ranks):
            for name, slab in slabs(job, layout.place(rank)).items():
                self.slabs[name][slab].append(rank)
                self.parts[part_of(name)].add(rank)

    def blocks(self, name: str, tensor: Tensor) -> dict[Slab, list[int]]:
        """The blocks of a tensor, and who keeps each. What is not cut like a parameter (a counter, a buffer)
        is whole wherever its part of the model is.
        """
        parameter = parameter_of(name)
        if self.shapes.get(parameter) == tuple(tensor.shape):
            slabs = self.slabs[parameter].items()
            return {slab: self._of_replica(name, ranks) for slab, ranks in slabs if prod(slab.shape)}
        whole = Slab((0,) * len(tensor.shape), tuple(tensor.shape))
        return {whole: self._of_replica(name, sorted(self.parts[part_of(parameter)]) or [0])}

    def _of_replica(self, name: str, ranks: list[int]) -> list[int]:
        """Of ranks with the same slab, those of the tensor's own replica; of one that is no more, any."""
        own = replica_of(name) if self.alone else None
        return [rank for rank in ranks if self.layout.place(rank).dp_replicate == own] or ranks


def _left_to_the_planner(job: Job) -> list[Problem]:
    if not job.layout.auto:
        return []
    hint = "Add --layout.auto false, and the degrees: --layout.tp 2 ..."
    return [
        Problem("layout.auto", "true: the planner would choose for this machine when the run starts", hint)
    ]


def _of_another_model(source: Path, manifest: Manifest, job: Job) -> list[Problem]:
    """The first parameter that a checkpoint has not, or has in another shape."""
    for parameter in parameters(job.spec):
        stored = manifest.tensors.get(f"model.{parameter.name}")
        if stored is None or tuple(stored.shape) != parameter.shape:
            there = "absent" if stored is None else tuple(stored.shape)
            message = f"{source} is not of this run's model: '{parameter.name}' is {there} there, "
            hint = "The run's job.toml and its checkpoints must belong together."
            return [Problem("RUN", message + f"and {parameter.shape} in the job", hint)]
    return []


def refuse_out(run: Path, out: Path, force: bool) -> None:
    """Raise `BadInput` where `out` is not a folder to write into."""
    if out.resolve() == run.resolve():
        hint = "Name another folder: nothing of the run is changed."
        raise BadInput([Problem("OUT", f"'{out}' is the run itself", hint)])
    if out.exists() and not out.is_dir():
        raise BadInput([Problem("OUT", f"'{out}' is a file", "Name a folder, which need not be there yet.")])
    if not force and out.is_dir() and any(out.iterdir()):
        hint = "Name another folder, or add --force: checkpoints that are in it are then removed."
        raise BadInput([Problem("OUT", f"'{out}' is not empty", hint)])
