"""The model's weights and gradients alone, as the ledger counts them under zero 1 to 3: see `account`."""

from __future__ import annotations

from fivefold.axes.pieces import EMBEDDING
from fivefold.axes.sharding import EXPERTS
from fivefold.replay.graph import Gradients, Storage, Tensor
from fivefold.replay.layers_program import Layer
from fivefold.replay.operations import Operations
from fivefold.replay.segments import Saved
from fivefold.replay.sharded_state import Sharded, Unit


class WeightsProgram:
    """Layers that use their weights and make gradients for them; activations have no size."""

    splits_backward = False
    """The ledger counts gradients as if each micro-batch's came in one piece."""

    def __init__(self, t: Operations, state: Sharded):
        self.t, self.state = t, state
        self.nothing = Tensor(Storage(t, 0), 0, 1)
        self.tied: Tensor | None = None

    def batch(self) -> list[Tensor]:
        return [self.nothing] * 3

    def stream(self) -> Tensor:
        return self.nothing

    def rope(self) -> None:
        """Blocks need none."""

    def layer(self, part: str) -> Layer:
        units = self.state.units
        if part not in units:
            return self._tied_end(units["root"], part)
        weight = self._weight(units[part], part, [p.count for p in units[part].group.members])
        if part + EXPERTS not in units:
            return lambda x, *_: self._use(x, weight)
        experts = self.layer(part + EXPERTS)
        around = self.state.around(part + EXPERTS, experts)
        return lambda x, *_: around(self._use(x, weight))

    def _tied_end(self, root: Unit, part: str) -> Layer:
        """Embedding or head of a tied model: weights of its own, and then the one they share."""
        shared = [p.count for p in root.group.members if p.name == EMBEDDING]
        own = [p.count for p in root.group.members if p.part == part and p.name != EMBEDDING]
        self.tied = tied = self.tied or self._weight(root, EMBEDDING, shared)
        weight = self._weight(root, part, own)
        return lambda x, *_: self._use(self._use(x, weight), tied)

    def _weight(self, unit: Unit, name: str, counts: list[int]) -> Tensor:
        return self.t.parameter(sum(counts), self.state.precision.compute_bytes, unit.taker(name))

    def _use(self, x: Tensor, weight: Tensor) -> Tensor:
        elements, width = weight.elements, weight.width

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            saved[0]
            return [g[0].detached(), self.state.gradients.empty(elements, width)]

        return self.t.record(x.detached(), [x, weight], backward, self.t.save(x))
