"""One micro-batch, as the model takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fivefold.data.dataset import Sample

NOT_SCORED = -100


@dataclass(frozen=True)
class Batch:
    """
    tokens     [b, s] int64
    targets    [b, s] int64: the next token, or -100 where nothing is to be predicted
    documents  [b, s] int64: tokens with equal numbers in a row see each other; None: all of a row do
    valid      how many targets are not -100 (a plain int: nobody has to wait for a device to know it)
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None
    valid: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        documents = self.documents
        return Batch(
            self.tokens.to(device, non_blocking=non_blocking),
            self.targets.to(device, non_blocking=non_blocking),
            None if documents is None else documents.to(device, non_blocking=non_blocking),
            self.valid,
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from where copies to a GPU overlap with its work."""
        documents = self.documents
        return Batch(
            self.tokens.pin_memory(),
            self.targets.pin_memory(),
            None if documents is None else documents.pin_memory(),
            self.valid,
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
    )
