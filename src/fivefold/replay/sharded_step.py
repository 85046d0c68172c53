"""Weights and gradients of one rank in a step under zero 1 to 3, unit by unit, as FSDP has them.

The counterpart of torch's `fully_shard` (2.11 to 2.13) as `axes/runtime/data_split.py` sets it. Buffers of
its messages are not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fivefold.axes.layout import Place
from fivefold.axes.pieces import EMBEDDING, Piece
from fivefold.axes.sharding import EXPERTS, Group, sharded_groups
from fivefold.axes.stages import actions, parts_of
from fivefold.config import Job
from fivefold.ledger.recompute import segment_length
from fivefold.ledger.setup import Setup

SEEN = 3
"""Without a pipeline so many micro-batches show all there is: the first, the last, and one between."""


@dataclass
class Unit:
    """Elements of what FSDP gathers and reduces together.

    gathered  weights that are there
    fresh     gradients in the compute dtype; `whole`: sums, where their dtype is wider
    shard     what a reduction leaves
    """

    group: Group
    gathered: int = 0
    fresh: int = 0
    whole: int = 0
    shard: int = 0


class ShardedStep:
    """A step, played: bytes of weights and gradients now, and the most there were.

    Gradients are looked at when one has come, and when a unit is through with them.
    """

    def __init__(self, job: Job, place: Place):
        self.setup = setup = Setup.of(job)
        self.units = {group.name: Unit(group) for group in sharded_groups(job, place)}
        self.stages = parts_of(job, place.pp)
        self.tied = 0
        self.most_weights = self.most_gradients = 0
        if setup.pp == 1:
            count = min(int(setup.micro_batches), SEEN)
            for number in range(count):
                self._forward(0)
                self._backward(0, last=number == count - 1)
            return
        first = min(self.stages)
        if first > 0 and not setup.frees_weights:  # it waits for its first micro-batch, with all weights
            self._gather(*self.stages[first])
        for action in actions(job)[place.pp]:
            if action.kind == "forward":
                self._forward(action.stage)
            elif action.kind in ("backward", "backward-input"):  # as if it always came in one piece
                self._backward(action.stage, last=False)
            elif action.kind == "reduce":
                self._through(self._units_of(*self.stages[action.stage]), last=True)

    @property
    def weights(self) -> int:
        return sum(unit.gathered for unit in self.units.values()) * self.setup.precision.compute_bytes

    @property
    def gradients(self) -> int:
        precision, units = self.setup.precision, self.units.values()
        narrow = self.tied + sum(unit.fresh for unit in units)
        wide = sum(unit.shard + unit.whole for unit in units)
        return narrow * precision.compute_bytes + wide * precision.reduce_bytes

    def _units_of(self, *parts: str) -> list[Unit]:
        names = [name for part in parts for name in (part, part + EXPERTS)]
        return [self.units[name] for name in names if name in self.units]

    def _gather(self, *parts: str) -> None:
        for unit in self._units_of(*parts):
            unit.gathered = unit.group.padded
        self.most_weights = max(self.most_weights, self.weights)

    def _forward(self, stage: int) -> None:
        self._gather("root")
        for part in self.stages[stage]:
            self._gather(part)
            if self.setup.frees_weights and part != "head":
                for unit in self._units_of(part):
                    unit.gathered = 0

    def _backward(self, stage: int, last: bool) -> None:
        parts = self.stages[stage]
        blocks = [part for part in parts if part.startswith("blocks.")]
        length = segment_length(self.setup.recompute, len(blocks)) or 1
        if "head" in parts:
            self._part_backward("head", last)
        for start in reversed(range(0, len(blocks), length)):
            segment = blocks[start : start + length]
            self._gather(*segment)  # they are all run forward again
            for part in reversed(segment):
                self._part_backward(part, last)
        if "embedding" in parts:
            self._part_backward("embedding", last)
        self._through(self.units.values(), last)

    def _part_backward(self, part: str, last: bool) -> None:
        """Gradients of a part come, of its spread experts first."""
        if "root" in self.units and part in ("embedding", "head"):
            root, first = self.units["root"], part == "head"
            # The head's gradient of the shared weight waits for the embedding's.
            self.tied = first * sum(piece.count for piece in root.group.members if piece.name == EMBEDDING)
            self._take(root, [piece for piece in root.group.members if piece.part == part or not first])
            return
        if part != "embedding" or not self.setup.spec.looks_up:
            self._gather(part)
        for unit in reversed(self._units_of(part)):
            self._take(unit, unit.group.members)
            if part != "embedding":  # whose input has no gradient, so that FSDP sees it at the end
                self._through([unit], last)

    def _take(self, unit: Unit, members: list[Piece]) -> None:
        """Of a unit these have gradients; what is added to a sum in its own dtype is gone."""
        unit.fresh = max(unit.fresh, sum(piece.count for piece in members))
        self.most_gradients = max(self.most_gradients, self.gradients)

    def _through(self, units: Iterable[Unit], last: bool) -> None:
        """A backward pass is through: weights are perhaps freed, gradients added up or reduced."""
        setup = self.setup
        for unit in units:
            if last or setup.frees_weights:
                unit.gathered = 0
            if (last or setup.reduces_every_micro_batch) and (unit.fresh or unit.whole):
                unit.fresh, unit.whole, unit.shard = 0, 0, unit.group.shard
            elif setup.precision.mixed:
                unit.fresh, unit.whole = 0, max(unit.whole, unit.fresh)
        self.most_gradients = max(self.most_gradients, self.gradients)
