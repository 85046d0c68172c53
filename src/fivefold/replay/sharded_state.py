"""Weights and gradients of one rank on a tape under zero 1 to 3: see `step`.

Stands beside torch's `fully_shard` (2.11 to 2.13) as `axes/data.py` sets it, with the buffers that it copies
into and out of. `axes/sharding.py` counts messages; this one follows memory from hook to hook.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fivefold.axes.layout import Place
from fivefold.axes.sharding import EXPERTS, Group, sharded_groups
from fivefold.axes.stages import stages, stages_of
from fivefold.ledger.setup import Setup
from fivefold.replay.graph import Arrived, Tensor
from fivefold.replay.layers_program import Layer
from fivefold.replay.operations import Operations
from fivefold.replay.tape import Tape

if TYPE_CHECKING:
    from fivefold.config import Job


class Sharded:
    """FSDP over the units of one rank: what it has gathered, what it is about to, what it reduces.

    frees      whether a unit's weights are freed between forward and backward
    reduces    whether the micro-batch under way reduces its gradients
    weights    the tape that gathered weights are on
    gradients  the tape that gradients are on: complete ones, and shards. Buffers of collectives are not
    """

    def __init__(self, t: Operations, job: Job, place: Place):
        setup = Setup.of(job)
        self.t, self.precision, self.zero = t, setup.precision, setup.zero
        self.weights: Tape = t
        self.gradients: Tape = t
        self.looks_up = setup.spec.looks_up
        self.frees, self.reduces_always = setup.frees_weights, bool(setup.reduces_every_micro_batch)
        self.replicas = setup.dp_replicate > 1
        self.units = {group.name: Unit(self, group) for group in sharded_groups(job, place)}
        self.deferred: Tensor | None = None
        self.reducing: Tensor | None = None
        self.order: list[Unit] = []
        self.reduces = self.last = False
        self.frees_after_backward = self.frees
        self.finishes = setup.pp == 1
        cut = stages(job)
        self.parts_of = {stage: cut[stage] for stage in stages_of(job, place.pp)}
        if self.frees:
            for parts in self.parts_of.values():
                self._chain(parts)

    def arrivals(self, part: str) -> Callable[[str], Arrived]:
        """For one part of the model: what happens to the gradients of its parameters."""
        return lambda name: self._unit(part, name).taker(f"{part}.{name}")

    def _unit(self, part: str, name: str) -> Unit:
        if name.startswith("mlp.experts.") and part + EXPERTS in self.units:
            return self.units[part + EXPERTS]
        return self.units[part] if part in self.units else self.units["root"]

    def _chain(self, names: list[str]) -> None:
        """Units in forward order: each gathers the next while it computes."""
        known = [self.units[name] for name in names if name in self.units and name != "root"]
        for unit, following in pairwise(known):
            unit.following = following

    def around(self, part: str, layer: Layer) -> Layer:
        """A layer with FSDP's hooks around it."""
        if part not in self.units:
            return layer
        unit = self.units[part]

        def hooked(x: Tensor, *others: Any) -> Tensor:
            x = unit.before_forward(x)
            return unit.after_forward(layer(x, *others))

        return hooked

    @property
    def gathered(self) -> int:
        """Bytes of weights that are not always there."""
        tensors = [unit.gathered for unit in self.units.values() if unit.gathered is not None]
        return sum(int(tensor.elements) * tensor.width for tensor in tensors)

    def before_micro_batch(self, last: bool) -> None:
        self.reduces, self.last = last or self.reduces_always, last
        self.frees_after_backward = last or self.zero == 3

    def reduce(self, stage: int) -> None:
        """A stage of a pipeline has seen its last micro-batch."""
        before = self.frees_after_backward
        self.reduces = self.last = self.frees_after_backward = True
        for unit in self._units_of(stage):
            unit.after_backward()
            unit.state, unit.summed, unit.gathering = "idle", None, None
        self.reducing = None
        self.reduces, self.last, self.frees_after_backward = False, False, before

    def before_weights(self) -> None:
        """Gradients lie with their units anyway."""

    def after_weights(self) -> None:
        """What came is taken into the units' sums."""
        self.after_backward()

    def _units_of(self, stage: int) -> list[Unit]:
        parts = self.parts_of[stage]
        names = ["root", *(name for part in parts for name in (part, part + EXPERTS))]
        return [self.units[name] for name in names if name in self.units]

    def after_forward(self) -> None:
        """At the end of the outermost module's forward: let go of the last buffer."""
        self.deferred = None

    def after_backward(self) -> None:
        """At the end of a backward pass: units whose inputs had no gradient, then buffers are let go."""
        for unit in self.units.values():
            if unit.state != "post-backward":
                unit.after_backward()
            unit.state = "idle"
        if self.finishes:
            for unit in self.units.values():
                unit.summed = unit.gathering = None
            self.order.clear()
            self.reducing = None


class Unit:
    """What FSDP gathers and reduces together."""

    def __init__(self, sharing: Sharded, group: Group):
        self.sharing, self.t, self.group = sharing, sharing.t, group
        self.state = "idle"
        self.following: Unit | None = None
        self.gathering: Tensor | None = None
        self.gathered: Tensor | None = None
        self.fresh: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}
        self.shard: Tensor | None = None
        self.partial: Tensor | None = None
        self.summed: Tensor | None = None
        self.places: list[int] = []
        self.resting = group.name not in ("head", "root")

    def taker(self, name: str) -> Arrived:
        def take(found: list[Tensor]) -> None:
            self.fresh.setdefault(name, found.pop())
            self.sharing.gradients.look()

        return take

    # --- weights ---------------------------------------------------------------------------------------

    def gather(self) -> None:
        if self.gathering is not None or self.gathered is not None:
            return
        if self.group.name == "embedding" and self.state == "pre-backward" and self.sharing.looks_up:
            return  # a lookup's backward needs no weights
        width = self.sharing.precision.compute_bytes
        if self.group.ranks == 1:
            self.gathering = self.t.empty(0, width)
            return
        copy = self.t.empty(self.group.shard, width) if self.sharing.precision.mixed else None
        self.gathering = self.t.empty(self.group.padded, width)
        del copy

    def finish_gathering(self) -> None:
        if self.gathering is None:
            return
        if self.state == "forward":
            self.sharing.deferred = None
        self.gathered = self.sharing.weights.empty(self.group.padded, self.sharing.precision.compute_bytes)
        if self.state == "forward" and self.group.ranks > 1:
            self.sharing.deferred = self.gathering  # let go after the next one's
        self.gathering = None

    # --- hooks -----------------------------------------------------------------------------------------

    def before_forward(self, x: Tensor) -> Tensor:
        if self.state == "pre-backward":  # recomputed
            if self.gathered is None:
                self.gather()
                self.finish_gathering()
            return x
        self.state = "forward"
        self.gather()
        self.finish_gathering()
        entered = x.detached()
        self.t.record(entered, [x], lambda g, _: self._then_after_backward(g))
        if self.following is not None:
            before, self.following.state = self.following.state, "forward"
            self.following.gather()
            self.following.state = before
        return entered

    def _then_after_backward(self, g: list[Tensor]) -> list[Tensor | None]:
        passed: list[Tensor | None] = [g.pop().detached()]
        self.after_backward()
        return passed

    def after_forward(self, x: Tensor) -> Tensor:
        if self.state == "pre-backward":
            return x
        if not self.t.recomputing:
            if self.sharing.frees and self.resting:
                self.gathered = None
            self.places.append(len(self.sharing.order))
            self.sharing.order.append(self)
        else:
            self.sharing.after_forward()
        left = x.detached()
        self.t.record(left, [x], lambda g, _: self._before_backward(g))
        self.state = "idle"
        return left

    def _before_backward(self, g: list[Tensor]) -> list[Tensor | None]:
        if self.state != "pre-backward":
            self.state = "pre-backward"
            self.gather()
            self.finish_gathering()
            if self.places:
                place = self.places.pop()
                if place > 0:
                    self._gather_ahead(self.sharing.order[place - 1])
        return [g.pop().detached()]

    def _gather_ahead(self, other: Unit) -> None:
        before, other.state = other.state, "pre-backward"
        other.gather()
        other.state = before

    # --- gradients -------------------------------------------------------------------------------------

    def after_backward(self) -> None:
        """A backward pass is through: gradients are added up or reduced, weights perhaps freed."""
        sharing, t, precision = self.sharing, self.t, self.sharing.precision
        self.state = "post-backward"
        for name in [name for name in self.fresh if name in self.whole]:
            del self.fresh[name]
        if not sharing.reduces:
            if sharing.frees_after_backward:
                self.gathered = None
            if precision.mixed:
                for name in list(self.fresh):
                    gradient = self.fresh.pop(name)
                    self.whole[name] = t.cast(gradient, precision.reduce_bytes)
                    del gradient
            sharing.gradients.look()
            return
        gradients = self.whole | self.fresh
        self.whole.clear()
        self.fresh.clear()
        if sharing.frees_after_backward:
            self.gathered = None
        sharing.reducing = None
        if not gradients:
            return
        self.summed = None
        together = t.empty(self.group.padded, precision.reduce_bytes)
        # Torch still has a name for the last of them while it reduces.
        last = gradients.get(self.group.members[-1].name) if self.group.ranks > 1 else None
        gradients.clear()
        shard = sharing.gradients.empty(self.group.shard, precision.reduce_bytes)
        if self.group.ranks == 1:
            t.like(together)  # divided by one on the way to the shard
        self._add_shard(shard)
        del last, shard
        sharing.gradients.look()
        sharing.reducing = together

    def _add_shard(self, shard: Tensor) -> None:
        if self.sharing.replicas:
            if not self.sharing.last:
                self.partial = self.partial or shard
                return
            self.partial, self.summed = None, shard
        self.shard = self.shard or shard
