"""All tensors of one rank, alive at each moment of one optimizer step: the step is played, not estimated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from fivefold.axes.account import account
from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import pieces, size_of
from fivefold.axes.sharding import EXPERTS
from fivefold.axes.stages import actions, stage_count, stages, stages_of
from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Setup
from fivefold.replay.backward import Halfway
from fivefold.replay.graph import Storage, Tensor
from fivefold.replay.layers_program import make_context
from fivefold.replay.operations import INTEGER, Operations
from fivefold.replay.program import Block, Embedding, Head, blocks_runner, selected
from fivefold.replay.replicated_state import Replicated
from fivefold.replay.sharded_state import Sharded
from fivefold.replay.sizes import Sizes

if TYPE_CHECKING:
    from fivefold.config import Job


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank in a steady optimizer step.

    rest   weights and optimizer states, which are there between steps too; under a pipeline also the buffers
           in which it receives
    saved  what the first forward pass leaves for its backward; gathered weights are not counted
    peak   the most alive at any moment, `rest` included; a batch's tokens are not
    first  the same, of the first forward pass alone
    """

    rest: int
    saved: int
    peak: int
    first: int


def replayed(job: Job, place: Place | None = None, device: str = "cuda") -> StepMemory:
    """Play one steady step of the rank at `place` (the first one by default), with a device's kernels."""
    return _Step(job, place or Place(), device).play()


class _Step:
    def __init__(self, job: Job, place: Place, device: str):
        self.job, self.place = job, place
        self.t = Operations(device)
        self.sizes = Sizes(Setup.of(job), place.cp)
        self.state = self._state()
        cut = stages(job)
        numbers = stages_of(job, place.pp)
        self.stages = {number: _Stage(self, cut[number]) for number in numbers}
        if isinstance(self.state, Sharded):
            self.state.parts_of = {number: cut[number] for number in numbers}
        self.saved = self.first = 0

    def _state(self) -> Replicated | Sharded:
        kind = Sharded if self.job.layout.zero else Replicated
        return kind(self.t, self.job, self.place)

    def play(self) -> StepMemory:
        t = self.t
        rest = self._rest()
        repeats = int(Setup.of(self.job).micro_batches)
        if self.job.layout.pp > 1:
            received = Pipelined(self, repeats).play()
        else:
            received = 0
            self._play_one_by_one(repeats)
        self._late_sums()
        return StepMemory(rest + received, self.saved, rest + int(t.peak), rest + self.first)

    def _play_one_by_one(self, repeats: int) -> None:
        t = self.t
        total = t.empty(1, self.sizes.wide)
        for number in range(repeats):
            self.state.before_micro_batch(last=number == repeats - 1)
            loss = self.stages[0].forward(self.batch())
            if number == 0:
                self.saved = int(t.now) - total.width - loss.width - self.state.gathered
                self.first = int(t.peak) - total.width
            t.backward(loss, t.like(loss))
            self.state.after_backward()

    def batch(self) -> list[Tensor]:
        """Tokens, targets and positions of one micro-batch: the batch's own, or a cp rank's part of them."""
        t, sizes = self.t, self.sizes
        length = sizes.tokens // sizes.rows
        given = [Tensor(Storage(t, 0), sizes.tokens, INTEGER) for _ in range(2)]
        if not sizes.several_cp:
            return [*given, t.empty(length, INTEGER)]
        if sizes.cp_kind != "ulysses":
            return [t.empty(size, INTEGER) for size in (sizes.tokens, sizes.tokens, length)]
        # A consecutive part of one row is a view of it.
        own = given if sizes.one_row else [t.empty(sizes.tokens, INTEGER) for _ in range(2)]
        return [*own, Tensor(Storage(t, self.job.training.seq_len * INTEGER), length, INTEGER)]

    def _late_sums(self) -> None:
        """Gradients that tp ranks have in part: put together, summed, and copied back."""
        layout, precision = Layout.of(self.job), precision_named(self.job.training.precision)
        count = size_of(pieces(self.job, self.place), layout, self.place).partial
        if layout.tp > 1 and count:
            together = self.t.empty(count, precision.reduce_bytes)
            total = self.t.like(together)
            del together, total

    def _rest(self) -> int:
        ledger = account(self.job, self.place)
        weights = ledger.rest("weights") if Layout.of(self.job).zero == 0 else 0
        layers = sum(part.startswith("blocks.") for stage in self.stages.values() for part in stage.parts)
        balancing = (
            2 * layers * self.sizes.experts * INTEGER
        )  # each layer's bias, and how often it chose whom
        return ledger.rest("states") + weights + balancing


class _Stage:
    """The parts of one stage, with what happens to their weights around them."""

    def __init__(self, step: _Step, parts: list[str]):
        t, sizes, state = step.t, step.sizes, step.state
        self.t, self.sizes, self.state, self.parts = t, sizes, state, parts
        recompute = step.job.training.recompute
        self.embedding = self.head = None
        tied = None
        blocks: list[Callable[..., Tensor]] = []
        for part in parts:
            arrivals = state.arrivals(part)
            if part == "embedding":
                embedding = Embedding(t, sizes, arrivals)
                tied = embedding.tokens if step.job.spec.tied else None
                self.embedding = state.around(part, embedding)
            elif part == "head":
                self.head = state.around(part, Head(t, sizes, arrivals, tied))
            else:
                block = Block(t, sizes, arrivals, partial(state.around, part + EXPERTS))
                blocks.append(state.around(part, selected(t, block) if recompute == "selective" else block))
        if isinstance(state, Sharded):
            state.chain(parts)
        self.run_blocks = blocks_runner(t, blocks, recompute)
        root = state.units.get("root") if isinstance(state, Sharded) else None
        self.run = self._run if root is None else state.around("root", self._run)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Tokens (or hidden states), targets and positions -> the loss, or hidden states."""
        x, targets, positions = inputs
        inputs.clear()
        result = self.run(x, targets, positions)
        self.state.after_forward()
        return result

    def _run(self, x: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x, positions)
        x = self.run_blocks(x, make_context(self.t, self.sizes))
        return x if self.head is None else self.head(x, targets)


class Pipelined:
    """Plays a rank's list of actions, as torch's runtime runs it (2.11 to 2.13).

    It receives into buffers that are there from one step to the next, one for every stage and micro-batch and
    for either direction. Between two stages of one rank the tensor itself takes the buffer's place.
    """

    def __init__(self, step: _Step, repeats: int):
        self.step, self.t, self.repeats = step, step.t, repeats
        job = step.job
        self.last = stage_count(job) - 1
        self.actions = actions(job)[step.place.pp]
        self.halves = Setup.of(job).splits_backward
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        for stage, number in product(step.stages, range(repeats)):
            if stage > 0:
                self.inputs[stage, number] = self._stream()
            if stage < self.last:
                self.gradients[stage, number] = self._stream()
        self.outputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.made: dict[tuple[int, int], Tensor] = {}
        self.halfway: dict[tuple[int, int], Halfway] = {}
        self.losses: list[Tensor] = []

    def _stream(self) -> Tensor:
        return self.t.empty(self.step.sizes.stream, self.step.sizes.width)

    def play(self) -> int:
        """Play the step; returns the bytes of the buffers that are always there."""
        received = int(self.t.now)
        batches = [self.step.batch() for _ in range(self.repeats)]
        for action in self.actions:
            key = action.stage, action.micro_batch
            if action.kind == "forward":
                self._forward(*key, batches[action.micro_batch])
            elif action.kind == "backward":
                self._backward(*key)
            elif action.kind == "backward-input":
                self._backward_input(*key)
            elif action.kind == "backward-weight":
                self._backward_weight(*key)
            elif action.kind == "send-gradient":
                self.made.pop(key, None)
            elif action.kind == "reduce":
                self.step.state.reduce(action.stage)
        return received

    def _forward(self, stage: int, number: int, batch: list[Tensor]) -> None:
        tokens, targets, positions = batch
        x = tokens
        if stage > 0:
            x = self.t.leaf(self.inputs[stage, number], lambda found: self._keep(stage, number, found))
        before = self.t.now
        result = self.step.stages[stage].forward([x if stage == 0 else self.t.view(x), targets, positions])
        if not self.outputs and not self.step.saved:
            self.step.saved, self.step.first = int(self.t.now - before), int(self.t.peak)
        if stage == self.last:
            self.losses.append(result)
        elif (stage + 1, number) in self.inputs:
            self.inputs[stage + 1, number] = result.detached()
        self.outputs[stage, number] = result, x

    def _keep(self, stage: int, number: int, found: list[Tensor]) -> None:
        """The gradient of a stage's input: on its way to the stage before."""
        gradient = found.pop()
        if (stage - 1, number) in self.gradients:
            self.gradients[stage - 1, number] = gradient
        else:
            self.made[stage, number] = gradient

    def _gradient(self, stage: int, number: int, result: Tensor) -> Tensor:
        return self.t.like(result) if stage == self.last else self.gradients[stage, number].detached()

    def _backward(self, stage: int, number: int) -> None:
        result, _ = self.outputs.pop((stage, number))
        self.t.backward(result, self._gradient(stage, number, result))
        self.step.state.after_backward()

    def _backward_input(self, stage: int, number: int) -> None:
        if not self.halves:
            self._backward(stage, number)
        elif stage > 0:
            result, x = self.outputs.pop((stage, number))
            gradient = self._gradient(stage, number, result)
            self.losses = [loss for loss in self.losses if loss is not result]
            self.halfway[stage, number] = self.t.backward_input(result, gradient, x)
            self.step.state.after_backward()

    def _backward_weight(self, stage: int, number: int) -> None:
        if not self.halves:
            return
        if stage == 0:
            self._backward(stage, number)
        else:
            self.step.state.before_weights()
            self.t.backward_weights(self.halfway.pop((stage, number)))
            self.step.state.after_weights()
