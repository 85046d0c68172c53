"""Weights and gradients of one rank in a step under zero 1 to 3, unit by unit, as FSDP has them.

The counterpart of torch's `fully_shard` (2.11 to 2.13) as `axes/runtime/data_split.py` sets it. Buffers of
its messages are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fivefold.axes.data import EXPERTS, Group, sharded_groups
from fivefold.axes.layout import Place
from fivefold.axes.pieces import EMBEDDING
from fivefold.axes.stages import actions, parts_of
from fivefold.ledger.setup import Setup, segment_length

if TYPE_CHECKING:
    from fivefold.config import Job

SEEN = 3
"""Without a pipeline so many micro-batches show all there is: the first, the last, and one between."""


@dataclass
class Unit:
    """Elements of what FSDP gathers and reduces together.

    gathered  weights that are there
    fresh     by part, gradients in the compute dtype; `whole`: sums, where their dtype is wider
    shard     what a reduction leaves
    """

    group: Group
    gathered: int = 0
    fresh: dict[str, int] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    shard: int = 0


class ShardedStep:
    """A step, played: bytes of weights and gradients now, and the most there were.

    Gradients are looked at when one has come, and when a unit is through with them.
    """

    def __init__(self, job: Job, place: Place):
        self.setup = setup = Setup.of(job)
        self.units = {group.name: Unit(group) for group in sharded_groups(job, place)}
        self.stages = parts_of(job, place.pp)
        self.most_weights = self.most_gradients = 0
        self.tied = 0
        if setup.pp == 1:
            count = min(int(setup.micro_batches), SEEN)
            for number in range(count):
                self._forward(0)
                self._backward(0, last=number == count - 1)
            return
        stays = not setup.frees_weights
        for index, stage in enumerate(self.stages):
            if stays and stage > 0 and index == 0:  # it waits for its first micro-batch, with all weights
                self._gather(*self._units_of(self.stages[stage]))
        for action in actions(job)[place.pp]:
            if action.kind == "forward":
                self._forward(action.stage)
            elif action.kind in ("backward", "backward-input"):  # as if it always came in one piece
                self._backward(action.stage, last=False)
            elif action.kind == "reduce":
                self._through(*self._units_of(self.stages[action.stage]), last=True)

    @property
    def weights(self) -> int:
        return sum(unit.gathered for unit in self.units.values()) * self.setup.precision.compute_bytes

    @property
    def gradients(self) -> int:
        precision = self.setup.precision
        narrow = self.tied + sum(sum(unit.fresh.values()) for unit in self.units.values())
        wide = sum(unit.shard + sum(unit.whole.values()) for unit in self.units.values())
        return narrow * precision.compute_bytes + wide * precision.reduce_bytes

    def _units_of(self, parts: list[str]) -> list[Unit]:
        names = [name for part in parts for name in (part, part + EXPERTS)]
        return [self.units[name] for name in names if name in self.units]

    def _gather(self, *units: Unit) -> None:
        for unit in units:
            unit.gathered = int(unit.group.size.padded)
        self.most_weights = max(self.most_weights, self.weights)

    def _forward(self, stage: int) -> None:
        for part in ["root", *self.stages[stage]]:
            units = self._units_of([part])
            self._gather(*units)
            if self.setup.frees_weights and part not in ("root", "head"):
                for unit in units:
                    unit.gathered = 0

    def _backward(self, stage: int, last: bool) -> None:
        parts = self.stages[stage]
        blocks = [part for part in parts if part.startswith("blocks.")]
        length = segment_length(self.setup.recompute, len(blocks)) or 1
        segments = [blocks[start : start + length] for start in range(0, len(blocks), length)]
        through: list[Unit] = []
        if "head" in parts:
            through += self._part_backward("head", last)
        for segment in reversed(segments):
            self._gather(*self._units_of(segment))  # they are all run forward again
            for part in reversed(segment):
                through += self._part_backward(part, last)
        if "embedding" in parts:
            self._part_backward("embedding", last)
        self._through(*(unit for unit in self.units.values() if unit not in through), last=last)

    def _part_backward(self, part: str, last: bool) -> list[Unit]:
        """Gradients of a part come, of its spread experts first. Returns the units that are through."""
        if part not in self.units:
            self._tied_backward(part)
            return []
        units = self._units_of([part])
        if part != "embedding" or not self.setup.spec.looks_up:
            self._gather(*units)
        for unit in reversed(units):
            self._take(unit, part, sum(piece.count for piece in unit.group.members))
            if part != "embedding":  # whose input has no gradient, so that FSDP sees it at the end
                self._through(unit, last=last)
        return units if part != "embedding" else []

    def _tied_backward(self, part: str) -> None:
        """The head's gradient of the shared weight waits for the embedding's."""
        root = self.units["root"]
        shared = sum(piece.count for piece in root.group.members if piece.name == EMBEDDING)
        own = sum(piece.count for piece in root.group.members if piece.part == part) - shared * (
            part != "head"
        )
        self.tied = shared if part == "head" else 0
        self._take(root, part, own + shared - self.tied)

    def _take(self, unit: Unit, part: str, count: int) -> None:
        """A gradient comes; what is added to a sum in its own dtype is gone."""
        unit.fresh.setdefault(part, count)
        self.most_gradients = max(self.most_gradients, self.gradients)

    def _through(self, *units: Unit, last: bool) -> None:
        """A backward pass is through: weights are perhaps freed, gradients added up or reduced."""
        setup = self.setup
        for unit in units:
            if last or setup.frees_weights:
                unit.gathered = 0
            if (last or setup.reduces_every_micro_batch) and (unit.fresh or unit.whole):
                unit.fresh, unit.whole, unit.shard = {}, {}, int(unit.group.size.shard)
            elif setup.precision.mixed:
                unit.fresh, unit.whole = {}, unit.whole | unit.fresh
            self.most_gradients = max(self.most_gradients, self.gradients)
