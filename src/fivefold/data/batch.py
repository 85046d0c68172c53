"""One micro-batch, as the model takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fivefold.data.dataset import Sample

NOT_SCORED = -100


@dataclass(frozen=True)
class Batch:
    """
    tokens     [b, s] int64
    targets    [b, s] int64: the next token, or -100 where nothing is to be predicted
    documents  [b, s] int64: tokens with equal numbers in a row see each other; None: all of a row do
    valid      how many targets are not -100 (a plain int: known without waiting for a device)
    boundaries [n + 1] int32: where each document begins in the batch read row by row, then b * s, repeated
               up to a power of two, so that there are few shapes; None without documents
    first      place of the first row in the order of samples; the other rows follow it
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None
    valid: int
    boundaries: torch.Tensor | None = None
    first: int = 0

    @property
    def inputs(self) -> dict[str, torch.Tensor | None]:
        """What the model takes, by the names it has there."""
        return {
            "tokens": self.tokens,
            "targets": self.targets,
            "documents": self.documents,
            "boundaries": self.boundaries,
        }

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        return self._with_each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from where copies to a GPU overlap with its work."""
        return self._with_each(lambda tensor: tensor.pin_memory())

    def _with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return Batch(
            change(self.tokens),
            change(self.targets),
            None if self.documents is None else change(self.documents),
            self.valid,
            None if self.boundaries is None else change(self.boundaries),
            self.first,
        )


def collate(samples: Sequence[Sample], separate_documents: bool) -> Batch:
    """Samples of equal length, [s + 1] each, as one batch [b, s].

    With `separate_documents` the last token of a document has no target (what follows it belongs to
    another document and cannot be known) and `documents` is set. Without, every next token is a
    target and `documents` is None.
    """
    tokens = np.stack([sample.tokens for sample in samples])
    targets = tokens[:, 1:].copy()
    if not separate_documents:
        return Batch(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets), None, targets.size)
    documents = np.stack([sample.documents for sample in samples])
    targets[documents[:, 1:] != documents[:, :-1]] = NOT_SCORED
    return Batch(
        torch.from_numpy(tokens[:, :-1].copy()),
        torch.from_numpy(targets),
        torch.from_numpy(documents[:, :-1].copy()),
        int(np.count_nonzero(targets != NOT_SCORED)),
        torch.from_numpy(_boundaries(documents[:, :-1])),
    )


def _boundaries(documents: NDArray[np.int64]) -> NDArray[np.int32]:
    """Where documents [b, s] begin, then b * s up to a power of two of them: see `Batch`."""
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = np.flatnonzero(begins)
    padded = np.full(1 << len(places).bit_length(), documents.size, dtype=np.int32)
    padded[: len(places)] = places
    return padded
