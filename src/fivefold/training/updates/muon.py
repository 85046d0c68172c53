"""Muon: matrices move by an orthogonal step in the direction of their gradients' momentum.

With the momentum m, the gradient g and the weights w of a matrix:

    m = mu m + g
    o = orthogonalised(g + mu m)        the whole matrix, by Newton-Schulz
    w = w - lr wd w - lr s o            s = 0.2 sqrt(the longer side)

All but the second line is done by each rank for what it keeps of a matrix. With that scale s an update is as
large as AdamW's usually is, so that learning rate and weight decay mean the same for both.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.axes.layout import Layout
from fivefold.axes.matrices import computed_in
from fivefold.axes.muon import Key, number_in_stage, plan_of
from fivefold.axes.runtime.matrix_exchange import MatrixExchange
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm.compat import add_each, scale_each
from fivefold.config import Job
from fivefold.ledger.precision import precision_named
from fivefold.training.updates.newton_schulz import orthogonalised
from fivefold.training.weights import Weights

USUAL_SIZE = 0.2
"""The root mean square of an update of AdamW's, in parts of the learning rate."""


class Muon:
    """The matrices of this rank's stage. See `update.Update`. All ranks of the stage must make it, and step.

    job, mesh  without outer steps: of a replica
    """

    publishes = False

    def __init__(self, job: Job, weights: Weights, mesh: Mesh, indices: Sequence[int]):
        settings = job.optimizer
        assert settings.momentum is not None, "call fivefold.config.resolve first"
        self.indices, self.masters = indices, weights.masters
        self.momentum, self.decay = settings.momentum, settings.weight_decay
        self.kinds = ["momentum_buffer"] if self.momentum else []
        self.momenta = {i: torch.zeros_like(self.masters[i]) for i in indices} if self.momentum else {}
        self.held = [index for index in indices if self.masters[index].numel() > 0]
        place, plan = mesh.place, plan_of(job, mesh.place.pp)
        rank = number_in_stage(Layout.of(job), place)
        precision, device = precision_named(job.training.precision), self.masters[0].device
        self.exchange = MatrixExchange(plan, rank, mesh.stage, getattr(torch, computed_in(precision)), device)
        self.scales = {m.key: USUAL_SIZE * math.sqrt(max(m.shape)) for m in plan.matrices}
        self.mine = _places(
            [m.key for m in plan.matrices if rank in m.shares.of_rank],
            {weights.names[index]: index for index in indices},
        )

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor | None = None) -> None:
        masters = [self.masters[index].detach() for index in self.held]
        gradients = [self._gradient(index) for index in self.held]
        if masters:
            if scale is not None:
                scale_each(gradients, scale)
            if self.momentum:
                momenta = [self.momenta[index] for index in self.held]
                scale_each(momenta, self.momentum)
                add_each(momenta, gradients)
                # In the gradients' own memory: nobody needs them any more.
                add_each(gradients, momenta, self.momentum)
            if self.decay:
                scale_each(masters, 1 - lr * self.decay)
        gradient_of = dict(zip(self.held, gradients, strict=True))
        master_of = dict(zip(self.held, masters, strict=True))

        def move(key: Key, result: Tensor) -> None:
            index, number = self.mine[key]
            _entry(master_of[index], number).add_(result, alpha=-lr * self.scales[key])

        pieces = {key: _entry(gradient_of[index], number) for key, (index, number) in self.mine.items()}
        self.exchange(pieces, orthogonalised, move)

    def states(self, index: int) -> dict[str, Tensor]:
        return {"momentum_buffer": self.momenta[index]} if self.momenta else {}

    def tensors_of(self, index: int) -> list[Tensor]:
        return list(self.states(index).values())

    def _gradient(self, index: int) -> Tensor:
        gradient = self.masters[index].grad
        assert gradient is not None
        return gradient


def _places(keys: Sequence[Key], index_of: dict[str, int]) -> dict[Key, tuple[int, int]]:
    """Where each matrix of which a rank holds a block is: which master, and which entry of it, of a stack."""
    firsts: dict[str, int] = {}
    for name, number in keys:
        firsts[name] = min(number, firsts.get(name, number))
    return {(name, number): (index_of[name], number - firsts[name]) for name, number in keys}


def _entry(tensor: Tensor, number: int) -> Tensor:
    """[rows, columns] of a matrix, or of one of a stack."""
    return tensor[number] if tensor.dim() == 3 else tensor
