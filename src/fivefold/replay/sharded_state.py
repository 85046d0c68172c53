"""Weights and gradients of one rank on a tape under zero 1 to 3: see `step`.

The counterpart of torch's `fully_shard` (2.11 to 2.13) as `axes/runtime/data_split.py` sets it, hook by hook,
with the buffers that it copies into and out of.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fivefold.axes.layout import Place
from fivefold.axes.sharding import EXPERTS, Group, sharded_groups
from fivefold.axes.stages import parts_of
from fivefold.ledger.setup import Setup
from fivefold.replay.graph import Arrived, Gradients, Tensor
from fivefold.replay.layers_program import Layer
from fivefold.replay.operations import Operations
from fivefold.replay.tape import Tape

if TYPE_CHECKING:
    from fivefold.config import Job


class Sharded:
    """FSDP over the units of one rank: what it has gathered, what it is about to, what it reduces.

    frees      whether a unit's weights are freed between forward and backward
    early      whether all weights are gathered at the start of a step
    last       whether the backward pass under way is the last of the step
    order      units as their forward passes ended: backward gathers them the other way round
    weights    the tape that gathered weights are on
    gradients  the tape that gradients and their shards are on; buffers of collectives are on neither
    """

    def __init__(self, t: Operations, job: Job, place: Place):
        setup = Setup.of(job)
        self.t, self.precision, self.looks_up = t, setup.precision, setup.spec.looks_up
        self.weights: Tape = t
        self.gradients: Tape = t
        self.frees, self.reduces_always = setup.frees_weights, bool(setup.reduces_every_micro_batch)
        self.replicas, self.pipelined = setup.dp_replicate > 1, setup.pp > 1
        self.early = self.pipelined and not self.frees
        self.units = {group.name: Unit(self, group) for group in sharded_groups(job, place)}
        self.parts_of = parts_of(job, place.pp)
        if self.frees:  # each unit gathers the next one of its stage while it computes
            for parts in self.parts_of.values():
                for unit, following in pairwise(self.units[part] for part in parts if part in self.units):
                    unit.following = following
        self.deferred: Tensor | None = None
        self.reducing: Tensor | None = None
        self.order: list[Unit] = []
        self.last = False

    def arrivals(self, part: str) -> Callable[[str], Arrived]:
        """For one part of the model: what happens to the gradients of its parameters."""
        return lambda name: self._unit(part, name).taker(f"{part}.{name}")

    def _unit(self, part: str, name: str) -> Unit:
        if name.startswith("mlp.experts.") and part + EXPERTS in self.units:
            return self.units[part + EXPERTS]
        return self.units[part] if part in self.units else self.units["root"]

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

    def before_schedule(self) -> None:
        """At the start of a pipeline's step: a stage that waits for its first micro-batch has its weights at
        once, other stages' units have theirs in the message's buffer until their first forward.
        """
        if not self.early:
            return
        for index, stage in enumerate(self.parts_of):
            waits = stage > 0 and index == 0
            for unit in self._units_of(stage):
                if waits:
                    unit.gather()
                else:
                    unit.start_gathering()

    def after_forward(self) -> None:
        """At the end of the outermost module's forward: let go of the last buffer."""
        self.deferred = None

    def before_weights(self) -> None:
        """Gradients lie with their units anyway."""

    def after_backward(self) -> None:
        """At the end of a backward pass: units whose inputs had no gradient, then buffers are let go."""
        for unit in self.units.values():
            if unit.state != "post-backward":
                unit.after_backward()
            unit.state = "idle"
        if not self.pipelined:
            self.order.clear()
            self._let_go(list(self.units.values()))

    after_weights = after_backward  # what came is taken into the units' sums

    def reduce(self, stage: int) -> None:
        """A stage of a pipeline has seen its last micro-batch."""
        units = self._units_of(stage)
        self.last = True
        for unit in units:
            unit.after_backward()
            unit.state = "idle"
        self.last = False
        self._let_go(units)

    def _units_of(self, stage: int) -> list[Unit]:
        names = [name for part in self.parts_of[stage] for name in (part, part + EXPERTS)]
        return [self.units[name] for name in names if name in self.units]

    def _let_go(self, units: list[Unit]) -> None:
        for unit in units:
            unit.summed = unit.gathering = None
        self.reducing = None


class Unit:
    """What FSDP gathers and reduces together.

    state      "pre-backward" from the gradient of its result to that of its input, then "post-backward"
    following  the unit that is gathered while this one computes
    gathering  the buffer of a gather under way; `gathered`: the weights themselves
    fresh      gradients in the compute dtype; `whole`: sums over micro-batches, where their dtype is wider
    partial    sums over shard ranks that replicas have not summed yet; `summed`: such a message's buffer
    places     where it stands in `Sharded.order`
    """

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

    def taker(self, name: str) -> Arrived:
        """What takes the gradient of one parameter."""

        def take(found: list[Tensor]) -> None:
            self.fresh.setdefault(name, found.pop())
            self.sharing.gradients.look()

        return take

    # --- weights ---------------------------------------------------------------------------------------

    def start_gathering(self, backward: bool = False) -> None:
        if self.gathering is not None or self.gathered is not None:
            return
        if backward and self.group.name == "embedding" and self.sharing.looks_up:
            return  # a lookup's backward needs no weights
        width = self.sharing.precision.compute_bytes
        if self.group.ranks == 1:
            self.gathering = self.t.empty(0, width)
            return
        copy = self.t.empty(self.group.shard, width) if self.sharing.precision.mixed else None
        self.gathering = self.t.empty(self.group.padded, width)
        del copy

    def gather(self, backward: bool = False) -> None:
        self.start_gathering(backward)
        if self.gathering is None:
            return
        if not backward:
            self.sharing.deferred = None
        self.gathered = self.sharing.weights.empty(self.group.padded, self.sharing.precision.compute_bytes)
        if not backward and not self.sharing.early and self.group.ranks > 1:
            self.sharing.deferred = self.gathering  # let go after the next one's
        self.gathering = None

    # --- hooks -----------------------------------------------------------------------------------------

    def before_forward(self, x: Tensor) -> Tensor:
        if self.state == "pre-backward":  # recomputed
            self.gather(backward=True)
            return x
        self.gather()
        entered = self.t.record(x.detached(), [x], lambda g, _: self._then_after_backward(g))
        if self.following is not None:
            self.following.start_gathering()
        return entered

    def after_forward(self, x: Tensor) -> Tensor:
        if self.state == "pre-backward":
            return x
        if self.t.recomputing:
            self.sharing.after_forward()
        else:
            if self.sharing.frees and self.group.name not in ("head", "root"):
                self.gathered = None
            self.places.append(len(self.sharing.order))
            self.sharing.order.append(self)
        return self.t.record(x.detached(), [x], lambda g, _: self._before_backward(g))

    def _before_backward(self, g: list[Tensor]) -> Gradients:
        if self.state != "pre-backward":
            self.state = "pre-backward"
            self.gather(backward=True)
            place = self.places.pop() if self.places else 0
            if place > 0:
                self.sharing.order[place - 1].start_gathering(backward=True)
        return [g.pop().detached()]

    def _then_after_backward(self, g: list[Tensor]) -> Gradients:
        passed: Gradients = [g.pop().detached()]
        self.after_backward()
        return passed

    # --- gradients -------------------------------------------------------------------------------------

    def after_backward(self) -> None:
        """A backward pass is through: weights are perhaps freed, gradients added up or reduced."""
        sharing = self.sharing
        self.state = "post-backward"
        if sharing.last or sharing.frees:
            self.gathered = None
        for name in self.fresh.keys() & self.whole.keys():
            del self.fresh[name]
        if sharing.last or sharing.reduces_always:
            self._reduce()
        elif sharing.precision.mixed:
            for name in list(self.fresh):
                self.whole[name] = self.t.cast(self.fresh.pop(name), sharing.precision.reduce_bytes)
        sharing.gradients.look()

    def _reduce(self) -> None:
        sharing, t, width = self.sharing, self.t, self.sharing.precision.reduce_bytes
        gradients = self.whole | self.fresh
        self.whole.clear()
        self.fresh.clear()
        sharing.reducing = None
        if not gradients:
            return
        self.summed = None
        together = t.empty(self.group.padded, width)
        # Torch still has a name for the last of them while it reduces.
        last = gradients.get(self.group.members[-1].name) if self.group.ranks > 1 else None
        gradients.clear()
        shard = sharing.gradients.empty(self.group.shard, width)
        if self.group.ranks == 1:
            t.like(together)  # divided by one on the way to the shard
        del last
        self._add_shard(shard)
        sharing.reducing = together

    def _add_shard(self, shard: Tensor) -> None:
        if self.sharing.replicas:
            if not self.sharing.last:
                self.partial = self.partial or shard
                return
            self.partial, self.summed = None, shard
        self.shard = self.shard or shard
