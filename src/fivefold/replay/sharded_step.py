"""Weights and gradients of one rank in a step under zero 1 to 3, group by group, as FSDP has them.

The counterpart of torch's `fully_shard` (2.11 to 2.13) as `axes/runtime/data_split.py` sets it. Buffers of
its messages are not counted.
"""

from collections.abc import Iterable

from fivefold.axes.data import EXPERTS, sharded_groups
from fivefold.axes.layout import Place
from fivefold.axes.pieces import Piece
from fivefold.axes.stages import actions, parts_of
from fivefold.config import Job
from fivefold.ledger.setup import Setup, segment_length
from fivefold.models.inventory import EMBEDDING

SEEN = 3
"""Without a pipeline so many micro-batches show all there is: the first, the last, and one between."""


class ShardedStep:
    """A step, played: bytes of weights and gradients now, and the most there were.

    Gradients are looked at when one has come, and when a group is through with them.

    gathered  groups whose weights are there
    fresh     by group, elements of gradients in the compute dtype
    sums      sums of them, where their dtype is wider, or the shard that a reduction leaves
    tied      the head's gradient of a shared weight, which waits for the embedding's
    """

    def __init__(self, job: Job, place: Place):
        self.setup = setup = Setup.of(job)
        self.groups = {group.name: group for group in sharded_groups(job, place)}
        self.stages = parts_of(job, place.pp)
        self.gathered: set[str] = set()
        self.fresh = dict.fromkeys(self.groups, 0)
        self.sums = dict.fromkeys(self.groups, 0)
        self.tied = self.most_weights = self.most_gradients = 0
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
                self._through(self._groups_of(*self.stages[action.stage]), last=True)

    @property
    def weights(self) -> int:
        precision = self.setup.precision
        return sum(int(self.groups[name].size.gathered_bytes(precision)) for name in self.gathered)

    @property
    def gradients(self) -> int:
        narrow, wide = self.tied + sum(self.fresh.values()), sum(self.sums.values())
        return narrow * self.setup.precision.compute_bytes + wide * self.setup.precision.reduce_bytes

    def _groups_of(self, *parts: str) -> list[str]:
        names = [name for part in parts for name in (part, part + EXPERTS)]
        return [name for name in names if name in self.groups]

    def _gather(self, *parts: str) -> None:
        self.gathered.update(self._groups_of(*parts))
        self.most_weights = max(self.most_weights, self.weights)

    def _forward(self, stage: int) -> None:
        self._gather("root")
        for part in self.stages[stage]:
            self._gather(part)
            if self.setup.frees_weights and part != "head":
                self.gathered.difference_update(self._groups_of(part))

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
        self._through(self.groups, last)

    def _part_backward(self, part: str, last: bool) -> None:
        """Gradients of a part come, of its spread experts first."""
        if "root" in self.groups and part in ("embedding", "head"):
            first, members = part == "head", self.groups["root"].members
            self.tied = first * sum(piece.count for piece in members if piece.name == EMBEDDING)
            self._take("root", [piece for piece in members if piece.part == part or not first])
            return
        if part != "embedding" or not self.setup.spec.looks_up:
            self._gather(part)
        for name in reversed(self._groups_of(part)):
            self._take(name, self.groups[name].members)
            if part != "embedding":  # whose input has no gradient, so that FSDP sees it at the end
                self._through([name], last)

    def _take(self, name: str, members: list[Piece]) -> None:
        """Of a group these have gradients; what is added to a sum in its own dtype is gone."""
        self.fresh[name] = max(self.fresh[name], sum(piece.count for piece in members))
        self.most_gradients = max(self.most_gradients, self.gradients)

    def _through(self, names: Iterable[str], last: bool) -> None:
        """A backward pass is through: weights are perhaps freed, gradients added up or reduced."""
        setup = self.setup
        for name in names:
            if last or setup.frees_weights:
                self.gathered.discard(name)
            if last or setup.reduces_every_micro_batch:
                self.fresh[name], self.sums[name] = 0, int(self.groups[name].size.shard)
            elif setup.precision.mixed:
                self.fresh[name], self.sums[name] = 0, max(self.fresh[name], self.sums[name])
        self.most_gradients = max(self.most_gradients, self.gradients)
