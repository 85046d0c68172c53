"""Weights of a Hugging Face folder, as ours: each rank reads the part that it has."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from fivefold.interchange.blocks import as_ours, copy_overlap, mapped
from fivefold.interchange.files import FLOATS, Files, open_files
from fivefold.interchange.names import CONSTANTS, FAMILIES, OUTPUT, Link, links, their_shapes
from fivefold.models.huggingface import model_type
from fivefold.models.spec import ModelSpec
from fivefold.problems import Problem, refuse
from fivefold.storage.safetensors import Stored
from fivefold.storage.tensors import DTYPES


class TheirWeights:
    """The weights of a folder, opened for a model. Raises `BadInput` with all that does not fit.

    tensors  by the names that the family's files have today, whatever prefix these lack
    """

    def __init__(self, folder: Path, spec: ModelSpec):
        family = model_type(folder, "model.weights")
        files = open_files(folder)
        refuse(files.problems)
        self.folder = folder
        self.tensors = _prefixed(files, FAMILIES[family].prefix)
        try:
            self.links = links(spec, family)
        except KeyError as part:
            message = f"is the folder of a {family} model, which has no {part}"
            refuse(
                [Problem(str(folder), message, "Leave model.hf and model.preset out, or name its folder.")]
            )
        refuse(_misfits(self.tensors, self.links, spec, str(folder)))
        self._of: dict[str, list[Link]] = defaultdict(list)
        for link in self.links:
            self._of[link.ours].append(link)

    def dtype(self, ours: str) -> torch.dtype:
        """In which dtype the folder has one of our parameters."""
        kinds = [DTYPES[self.tensors[link.theirs][1].dtype] for link in self._of[ours]]
        widest = kinds[0]
        for kind in kinds[1:]:
            widest = torch.promote_types(widest, kind)
        return widest

    def dtypes(self) -> dict[str, str]:
        """The dtype of each of their tensors, by the format's names."""
        return {name: self.tensors[name][1].dtype for name in their_shapes(self.links)}

    @torch.no_grad()
    def fill(self, ours: str, target: torch.Tensor, offset: Sequence[int]) -> None:
        """Fill the block of one of our parameters that begins at `offset`. The rest of it is not read."""
        for link in self._of[ours]:
            first = None if link.expert is None else link.expert - offset[0]
            if first is not None and not 0 <= first < target.shape[0]:
                continue
            path, stored = self.tensors[link.theirs]
            view, start = as_ours(link, mapped(path, stored.dtype, link.shape, stored.offset))
            copy_overlap(target, offset, view, start)


def _prefixed(files: Files, prefix: str) -> dict[str, tuple[Path, Stored]]:
    """The tensors under today's names; tables that a model makes itself are left out."""
    weights = {name: entry for name, entry in files.tensors.items() if not name.endswith(CONSTANTS)}
    if any(name.startswith(prefix) for name in weights):
        return weights
    return {name if name == OUTPUT else prefix + name: entry for name, entry in weights.items()}


def _misfits(
    tensors: dict[str, tuple[Path, Stored]], found: list[Link], spec: ModelSpec, folder: str
) -> list[Problem]:
    """Why these are not the weights of a model: what is missing, left over, of another shape or kind."""
    expected = their_shapes(found)
    problems = [Problem(folder, f"'{name}' is missing") for name in expected if name not in tensors]
    for name, (path, stored) in tensors.items():
        if name == OUTPUT and spec.tied:
            if not _same(tensors, found, name):
                message = f"'{name}' is not the embedding, but the model is said to use one for both"
                problems.append(Problem(str(path), message, "Set model.tied = false."))
        elif name not in expected:
            problems.append(Problem(str(path), f"'{name}' is in it, but not in this model"))
        elif stored.shape != expected[name]:
            message = f"'{name}' has shape {list(stored.shape)}, but {list(expected[name])} in this model"
            problems.append(Problem(str(path), message))
        elif stored.dtype not in FLOATS:
            message = f"'{name}' has dtype {stored.dtype}; allowed: {', '.join(FLOATS)}"
            problems.append(Problem(str(path), message, "Quantized weights cannot be trained here."))
    return problems


def _same(tensors: dict[str, tuple[Path, Stored]], found: list[Link], name: str) -> bool:
    """Whether an output matrix that is stored beside a tied embedding is a copy of it."""
    embedding = next(link for link in found if link.ours == "embedding.tokens.weight")
    pair = [tensors.get(embedding.theirs), tensors[name]]
    if any(entry is None or entry[1].shape != embedding.shape for entry in pair):
        return False
    first, second = (mapped(e[0], e[1].dtype, e[1].shape, e[1].offset) for e in pair if e is not None)
    return first.dtype == second.dtype and torch.equal(first, second)
