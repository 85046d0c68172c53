"""A checkpoint of step 0 that holds the weights of a Hugging Face folder, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import torch

from fivefold.interchange.read import TheirWeights
from fivefold.models.inventory import parameters
from fivefold.models.spec import ModelSpec
from fivefold.storage.folder import begin, commit
from fivefold.storage.manifest import File, Manifest, Piece, Tensor
from fivefold.storage.safetensors import laid_out, write
from fivefold.storage.tensors import NAMES, as_bytes

FILE = "rank-00000.safetensors"


def write_start(
    weights: TheirWeights, spec: ModelSpec, run: Path, versions: dict[str, str], job: str
) -> Path:
    """Write a run's checkpoint of step 0, one tensor after the other, each in the dtype that it came in."""
    shapes = {each.name: each.shape for each in parameters(spec)}
    dtypes = {name: weights.dtype(name) for name in shapes}
    beginning, stored = laid_out({name: (NAMES[dtypes[name]], shape) for name, shape in shapes.items()})

    def contents() -> Iterator[memoryview]:
        for name, shape in shapes.items():
            whole = torch.empty(shape, dtype=dtypes[name])
            weights.fill(name, whole, (0,) * len(shape))
            yield memoryview(as_bytes(whole))

    size, checksum = write(begin(run, 0) / FILE, beginning, contents())
    tensors = {
        f"model.{name}": Tensor(
            shape=list(shape),
            dtype=NAMES[dtypes[name]],
            pieces=[Piece(start=[0] * len(shape), shape=list(shape), file=FILE, offset=stored[name].offset)],
        )
        for name, shape in shapes.items()
    }
    manifest = Manifest(
        step=0,
        versions=versions,
        job=job,
        data={},
        progress={"step": 0, "tokens": 0},
        tensors=tensors,
        files={FILE: File(bytes=size, checksum=checksum)},
    )
    return commit(run, manifest)
