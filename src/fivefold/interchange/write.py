"""The weights of a checkpoint as Hugging Face files, written tensor by tensor: one is in memory at a time."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fivefold.interchange.blocks import as_ours, copy_overlap, mapped
from fivefold.interchange.files import INDEX, SINGLE
from fivefold.interchange.names import Link, their_shapes
from fivefold.storage.folder import durable
from fivefold.storage.manifest import Manifest
from fivefold.storage.safetensors import WIDTHS, laid_out, write
from fivefold.storage.tensors import DTYPES, as_bytes

METADATA = {"format": "pt"}
"""`transformers` asks for it before it reads a file."""


class Weights:
    """A checkpoint's weights, as the tensors of a Hugging Face folder.

    folder    of the checkpoint, which has been verified
    ours      our parameter -> the checkpoint's name of the tensor: the weights, or their average
    links     every tensor of theirs
    dtypes    of each of theirs
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        ours: Mapping[str, str],
        links: list[Link],
        dtypes: Mapping[str, str],
    ):
        self.folder, self.manifest, self.ours, self.dtypes = folder, manifest, ours, dtypes
        self.shapes = their_shapes(links)
        self._links: dict[str, list[Link]] = defaultdict(list)
        for link in links:
            self._links[link.theirs].append(link)

    def tensor(self, theirs: str) -> torch.Tensor:
        """One of their tensors, whole."""
        whole = torch.empty(self.shapes[theirs], dtype=DTYPES[self.dtypes[theirs]])
        for link in self._links[theirs]:
            target, at = as_ours(link, whole)
            stored = self.manifest.tensors[self.ours[link.ours]]
            for piece in stored.pieces:
                if link.expert is None or piece.start[0] <= link.expert < piece.start[0] + piece.shape[0]:
                    source = mapped(self.folder / piece.file, stored.dtype, piece.shape, piece.offset)
                    copy_overlap(target, at, source, piece.start)
        return whole

    def shards(self, most: int) -> list[dict[str, tuple[int, ...]]]:
        """Their tensors in files of at most `most` bytes each; one that is larger has a file to itself."""
        found: list[dict[str, tuple[int, ...]]] = [{}]
        room = most
        for name, shape in sorted(self.shapes.items()):
            size = self.size_of(name, shape)
            if size > room and found[-1]:
                found.append({})
                room = most
            found[-1][name] = shape
            room -= size
        return found

    def moved_biases(self) -> bool:
        """Whether a router chooses by more than the weights say: see `models/moe.py`."""
        biases = [tensor for name, tensor in self.manifest.tensors.items() if name.endswith(".bias_steps")]
        return any(
            bool(mapped(self.folder / piece.file, tensor.dtype, piece.shape, piece.offset).any())
            for tensor in biases
            for piece in tensor.pieces
        )

    def size_of(self, name: str, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * WIDTHS[self.dtypes[name]]

    @property
    def bytes(self) -> int:
        return sum(self.size_of(name, shape) for name, shape in self.shapes.items())


def write_weights(weights: Weights, out: Path, most: int) -> list[str]:
    """Write the safetensors files and, where there are several, their index. Returns the files' names."""
    shards = weights.shards(most)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        beginning, _ = laid_out({name: (weights.dtypes[name], shard[name]) for name in shard}, METADATA)
        write(out / file, beginning, _contents(weights, shard))
        places |= dict.fromkeys(shard, file)
    if len(shards) == 1:
        return [SINGLE]
    index = {"metadata": {"total_size": weights.bytes}, "weight_map": places}
    durable(out / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return [*dict.fromkeys(places.values()), INDEX]


def _contents(weights: Weights, shard: Mapping[str, tuple[int, ...]]) -> Iterator[memoryview]:
    for name in shard:
        yield memoryview(as_bytes(weights.tensor(name)))
