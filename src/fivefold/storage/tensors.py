"""Tensors of all ranks, to files and back: the storage under `torch.distributed.checkpoint`.

Torch plans who writes which piece and who reads which part of it, over any two layouts. Each rank writes one
safetensors file; where everything lies stands in the manifest. Nothing is pickled.
"""

import json
import math
import mmap
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fivefold.storage.folder import durable
from fivefold.storage.manifest import File, Manifest, Piece, Tensor, file_name, piece_name
from fivefold.storage.safetensors import laid_out, write

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Staging:
    """Copies of tensors in the host's memory, made into the same buffers at every save."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)


class PiecesWriter(StorageWriter):
    """Takes this rank's tensors out of the device; `write` brings them to the disk, later if need be.

    staging  where they are copied to
    changes  they may change before they are written: those in the host's memory are copied too
    tensors  on rank 0, after the plan is made: every tensor with its pieces, as the manifest has them
    """

    def __init__(self, rank: int, staging: Staging, changes: bool):
        self.name, self.staging, self.changes = file_name(rank), staging, changes
        self.staged: dict[str, torch.Tensor] = {}
        self.beginning = b""
        self.tensors: dict[str, Tensor] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy what this rank is to write; where it will lie follows from the sizes alone."""
        items = {piece_name(*_place(item.index)): item for item in plan.items}
        for name, item in items.items():
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            tensor = tensor.detach()
            copied = self.changes or tensor.is_cuda
            self.staged[name] = self.staging.copied(name, tensor) if copied else tensor
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.beginning, stored = laid_out({n: (NAMES[t.dtype], t.shape) for n, t in self.staged.items()})
        results = [
            WriteResult(item.index, stored[name].bytes, (self.name, stored[name].offset))
            for name, item in items.items()
        ]
        found: Future[list[WriteResult]] = Future()
        found.set_result(results)
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: the tensors of all ranks, as the plan has cut them."""
        places = {_place(result.index): result.storage_data for each in results for result in each}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            pieces = []
            for chunk in entry.chunks:
                start, shape = list(chunk.offsets), list(chunk.sizes)
                file, offset = places[name, tuple(start)]
                pieces.append(Piece(start=start, shape=shape, file=file, offset=offset))
            dtype = NAMES[entry.properties.dtype]
            self.tensors[name] = Tensor(shape=list(entry.size), dtype=dtype, pieces=pieces)

    def write(self, folder: Path) -> File:
        """Bring what was copied to the disk."""
        contents = (memoryview(as_bytes(tensor)) for tensor in self.staged.values())
        size, checksum = write(folder / self.name, self.beginning, contents)
        return File(bytes=size, checksum=checksum)


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    """Which tensor a piece is of, and where it begins."""
    return index.fqn, tuple(index.offset or ())


def as_bytes(tensor: torch.Tensor) -> Any:
    """The elements of a tensor on the CPU, as a numpy array of bytes; not a copy where it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


class PiecesReader(StorageReader):
    """Reads the pieces that a manifest lists."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._places: dict[tuple[str, tuple[int, ...]], tuple[str, Piece]] = {
            (name, tuple(piece.start)): (tensor.dtype, piece)
            for name, tensor in manifest.tensors.items()
            for piece in tensor.pieces
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        def stored(tensor: Tensor) -> TensorStorageMetadata:
            chunks = [
                ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.shape))
                for piece in tensor.pieces
            ]
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)

        return Metadata({name: stored(tensor) for name, tensor in self.manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *a: Any, **k: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = defaultdict(list)
        for item in plan.items:
            dtype, piece = self._places[_place(item.storage_index)]
            by_file[piece.file].append((item, dtype, piece))
        for name, wanted in by_file.items():
            with (
                open(self.folder / name, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content,
            ):
                for item, dtype, piece in wanted:
                    whole = read_piece(content, dtype, piece.shape, piece.offset)
                    part = whole
                    for axis, (start, length) in enumerate(
                        zip(item.storage_offsets, item.lengths, strict=True)
                    ):
                        part = part.narrow(axis, start, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
                    del whole, part
        found: Future[None] = Future()
        found.set_result(None)
        return found


def read_piece(content: Any, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    """A tensor over a file's bytes: not a copy."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(content, dtype=DTYPES[dtype], count=count, offset=offset).view(shape)


def leave_part(folder: Path, rank: int, written: Mapping[str, File], problem: str | None = None) -> None:
    """Say in the folder that a rank has written its files, or why it could not.

    On a full disk there may be no room for the reason: then the name of an empty file has to do.
    """
    new = folder / f"rank-{rank:05d}.part"
    parts = {"files": {name: file.model_dump() for name, file in written.items()}, "problem": problem}
    try:
        durable(new, json.dumps(parts).encode())
    except OSError:
        new.write_bytes(b"")
    new.rename(new.with_suffix(".json"))


def gathered_parts(folder: Path, ranks: int, patience: float = 0.02) -> tuple[dict[str, File], list[str]]:
    """Every rank's files, and why ranks could not write theirs, as soon as all have said so.

    What they said is removed.
    """
    found: dict[str, File] = {}
    problems = []
    for rank in range(ranks):
        path = folder / f"rank-{rank:05d}.json"
        while not path.exists():
            time.sleep(patience)
        parts = json.loads(path.read_text() or '{"files": {}, "problem": "the disk is full"}')
        found |= {name: File(**file) for name, file in parts["files"].items()}
        if parts["problem"]:
            problems.append(parts["problem"])
        path.unlink()
    return found, problems
