"""Sums of gradients that no axis' own machinery does: once a step, after backward.

Some parameters are whole on every tp rank, but each computes only its share of their gradient (norms under
sequence parallelism, biases of row-split projections). And the first and last stage of a tied model have a
copy each of the embedding. Adding these up once, at the end, costs one message each instead of one for every
layer and micro-batch.
"""

import torch

from fivefold.axes.pieces import Piece
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm.collectives import summed
from fivefold.comm.compat import copy_each
from fivefold.comm.point_to_point import Exchange


class LateSums:
    """Call with this rank's gradients, one per piece: changes in place those that are to be summed."""

    def __init__(self, mine: list[Piece], mesh: Mesh):
        self.partial = [index for index, piece in enumerate(mine) if piece.partial]
        self.shared = [index for index, piece in enumerate(mine) if piece.shared]
        self.tp = mesh.group("tp")
        self.pp = mesh.group("pp")
        self.other_end = mesh.layout.pp - 1 - mesh.place.pp

    @torch.no_grad()
    def __call__(self, gradients: list[torch.Tensor]) -> None:
        self._sum_partial([gradients[index] for index in self.partial])
        if len(self.shared) == 2:
            first, last = (gradients[index] for index in self.shared)
            last.copy_(first.add_(last))
        elif self.shared and gradients[self.shared[0]].numel():
            gradient = gradients[self.shared[0]]
            assert self.pp is not None
            gradient.add_(Exchange(gradient, self.pp, to=self.other_end, source=self.other_end).wait())

    def _sum_partial(self, gradients: list[torch.Tensor]) -> None:
        if self.tp is None or not sum(gradient.numel() for gradient in gradients):
            return
        total = summed(torch.cat([gradient.flatten() for gradient in gradients]), self.tp)
        parts = total.split([gradient.numel() for gradient in gradients])
        copy_each(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
