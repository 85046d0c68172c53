"""Muon: matrices move by an orthogonal step in the direction of their gradients' momentum.

With the momentum m, the gradient g and the weights w of a matrix:

    m = mu m + g
    o = orthogonalised(g + mu m)        the whole matrix, by Newton-Schulz
    w = w - lr wd w - lr s o            s = 0.2 sqrt(the longer side)

All but the second line is done by each rank for what it keeps of a matrix. With that scale s an update is as
large as AdamW's usually is, so that learning rate and weight decay mean the same for both.

Where states are narrow the momentum is kept in bfloat16, rounded by chance (`stochastic.py`): the second line
takes it as it was before that. It has no second moment to be told a scale by, so it is never in 8 bits.
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
from fivefold.ledger.precision import momentum_in, precision_named
from fivefold.training.updates import operations, stochastic
from fivefold.training.updates.newton_schulz import orthogonalised
from fivefold.training.updates.places import Places
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
        self.momenta, self.counts = dict[int, Tensor](), dict[int, Tensor]()
        precision = precision_named(job.training.precision)
        self.rounds = momentum_in(job.optimizer.states, precision) != precision.master
        for index in indices if self.momentum else ():
            self._make(index)
        self.seed, self.names = job.training.seed, weights.names
        self.held = [index for index in indices if self.masters[index].numel() > 0]
        self.places = {index: Places.of(weights.parameters[index]) for index in self.held}
        place, plan = mesh.place, plan_of(job, mesh.place.pp)
        rank = number_in_stage(Layout.of(job), place)
        dtype, device = getattr(torch, computed_in(precision)), self.masters[0].device
        self.exchange = MatrixExchange(plan, rank, mesh.stage, dtype, device)
        self.scales = {m.key: USUAL_SIZE * math.sqrt(max(m.shape)) for m in plan.matrices}
        self.mine = _places(
            [m.key for m in plan.matrices if rank in m.shares.of_rank],
            {weights.names[index]: index for index in indices},
        )

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor | None = None) -> None:
        for count in self.counts.values():  # of empty shards too: a checkpoint may keep theirs
            count.add_(1)
        masters = [self.masters[index].detach() for index in self.held]
        gradients = [self._gradient(index) for index in self.held]
        if masters:
            # In the gradients' own memory: nobody needs them any more.
            if self.counts:
                self._rounded_momentum(gradients, scale)
            else:
                self._momentum(gradients, scale)
            if self.decay:
                scale_each(masters, 1 - lr * self.decay)
        gradient_of = dict(zip(self.held, gradients, strict=True))
        master_of = dict(zip(self.held, masters, strict=True))

        def move(key: Key, result: Tensor) -> None:
            index, number = self.mine[key]
            _entry(master_of[index], number).add_(result, alpha=-lr * self.scales[key])

        pieces = {key: _entry(gradient_of[index], number) for key, (index, number) in self.mine.items()}
        self.exchange(pieces, orthogonalised, move)

    def _momentum(self, gradients: list[Tensor], scale: Tensor | None) -> None:
        if scale is not None:
            scale_each(gradients, scale)
        if self.momentum:
            momenta = [self.momenta[index] for index in self.held]
            scale_each(momenta, self.momentum)
            add_each(momenta, gradients)
            add_each(gradients, momenta, self.momentum)

    def _rounded_momentum(self, gradients: list[Tensor], scale: Tensor | None) -> None:
        """The same, with a momentum that is rounded by chance."""
        for index, gradient in zip(self.held, gradients, strict=True):
            key = stochastic.key_of(self.seed, int(self.counts[index].item()), self.names[index])
            row = gradient.contiguous()  # a user's own model may have its weights transposed in memory
            operands = row, self.momenta[index], self.momentum, scale, self.places[index], key
            if row.is_cuda:
                from fivefold.training.updates import kernels

                kernels.momentum(*operands)
            else:
                operations.momentum(*operands)
            if row is not gradient:
                gradient.copy_(row)

    def _make(self, index: int) -> None:
        master = self.masters[index]
        if not self.rounds:
            self.momenta[index] = torch.zeros_like(master)
            return
        self.momenta[index] = torch.zeros(master.shape, dtype=torch.bfloat16, device=master.device)
        self.counts[index] = torch.zeros((), dtype=torch.float32)

    def states(self, index: int) -> dict[str, Tensor]:
        """Beside the momentum, where chance has to know it, the number of updates."""
        counted = {"step": self.counts[index]} if self.counts else {}
        return {"momentum_buffer": self.momenta[index], **counted} if self.momenta else {}

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
