"""Optimizer states in the host's memory: an update streams them through the device, piece by piece.

A piece is a few million neighbouring elements of one parameter. While its rule updates one of them, with
gradients that are on the device anyway, the next one comes and the last one goes back (`transfers.py`). An
update is a function of one element: cut into pieces it computes the same bits.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fivefold.comm.compat import move_each
from fivefold.ledger.offload import BUFFERS, PART
from fivefold.training.host_tensors import on_host, zeros_on_host
from fivefold.training.updates.operations import Operands
from fivefold.training.updates.places import Places
from fivefold.training.updates.transfers import Transfers
from fivefold.training.weights import Weights

MASTER, AVERAGE = "master", "ema"


class PieceRule(Protocol):
    """A rule that can update a piece of a master by itself.

    indices  of which masters
    kinds    names of its states, which have the shape of their master, and `dtype`
    counted  it counts its updates
    places   of each master that has elements, where they lie in the whole, as far as the rule has to know
    """

    dtype: torch.dtype
    counted: bool

    @property
    def indices(self) -> Sequence[int]: ...

    @property
    def kinds(self) -> Sequence[str]: ...

    @property
    def places(self) -> Mapping[int, Places]: ...

    def move(
        self, index: int, operands: Operands, places: Places, count: int, lr: float, scale: Tensor | None
    ) -> None:
        """The update number `count` of a piece of a master, which lies at `places`."""
        ...


class Offloaded:
    """The states of a rule in host memory, with averaged weights where there are any. See `update.Update`.

    average   the share of itself that an average of the weights keeps in a step; None without one
    averages  one per master
    """

    publishes = True

    def __init__(self, rule: PieceRule, weights: Weights, average: float | None):
        self.rule, self.weights, self.average = rule, weights, average
        self.indices, self.kinds = rule.indices, rule.kinds
        device, masters = weights.device, weights.masters
        self.kept = {
            index: {kind: zeros_on_host(masters[index].shape, rule.dtype, device) for kind in rule.kinds}
            for index in rule.indices
        }
        counted = rule.indices if rule.counted else ()
        self.counts = {index: torch.zeros((), dtype=torch.float32) for index in counted}
        self.averages = None if average is None else [on_host(master, device) for master in masters]
        self.pieces = {index: list(places.cut(PART)) for index, places in rule.places.items()}
        self.most = min(PART, max((masters[index].numel() for index in self.pieces), default=0))

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor | None = None) -> None:
        for count in self.counts.values():
            count += 1
        here = {name: one.dtype for index in self.pieces for name, one in self._on_host(index).items()}
        with Transfers(self.weights.device, here, self.most, BUFFERS) as transfers:
            on_device = self.weights.on_device()
            for index in self.pieces:
                self._update(index, on_device[index].detach(), transfers, lr, scale)

    def _update(
        self, index: int, held: Tensor, transfers: Transfers, lr: float, scale: Tensor | None
    ) -> None:
        """One master, piece by piece. `held`: itself, or the copy that computes, on the device."""
        gradient = self.weights.holders[index].grad
        assert gradient is not None
        # A user's own model may have its weights transposed in memory.
        flat, gradients = held.contiguous().view(-1), gradient.contiguous().view(-1)
        there = {name: tensor.detach().view(-1) for name, tensor in self._on_host(index).items()}
        count = int(self.counts[index].item()) if self.counts else 0
        for start, stop, places in self.pieces[index]:
            with transfers.of({name: tensor[start:stop] for name, tensor in there.items()}) as here:
                piece = flat[start:stop]
                master, copy = (here[MASTER], piece) if MASTER in here else (piece, None)
                states = tuple(here[kind] for kind in self.kinds)
                operands = Operands(gradients[start:stop], master, states, copy)
                self.rule.move(index, operands, places, count, lr, scale)
                if self.average is not None:
                    move_each([here[AVERAGE]], [master], 1 - self.average)
        if not held.is_contiguous():
            held.copy_(flat.view(held.shape))

    def _on_host(self, index: int) -> dict[str, Tensor]:
        """What travels of one master, by name."""
        found = dict(self.kept[index])
        if self.weights.masters_on_host:
            found[MASTER] = self.weights.masters[index]
        if self.averages is not None:
            found[AVERAGE] = self.averages[index]
        return found

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        kept = [tensor for index in self.indices for tensor in self._on_host(index).values()]
        return sum(tensor.nbytes for tensor in (*kept, *self.counts.values()))

    def states(self, index: int) -> dict[str, Tensor]:
        count = {"step": self.counts[index]} if self.counts else {}
        return {**count, **self.kept[index]}

    def tensors_of(self, index: int) -> list[Tensor]:
        return list(self.states(index).values())
