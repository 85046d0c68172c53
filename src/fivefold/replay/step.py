"""Replays one rank's optimizer step: its stages forward and backward, micro-batch by micro-batch."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from fivefold.axes.layout import Place
from fivefold.axes.stages import actions, parts_of, stage_count
from fivefold.ledger.setup import Setup
from fivefold.replay.backward import Halfway
from fivefold.replay.graph import Tensor
from fivefold.replay.operations import WIDE
from fivefold.replay.program import ModelProgram, blocks_runner
from fivefold.replay.replicated_state import Replicated
from fivefold.replay.sharded_state import Sharded
from fivefold.replay.sizes import passes
from fivefold.replay.weights_program import WeightsProgram

if TYPE_CHECKING:
    from fivefold.config import Job


Program = ModelProgram | WeightsProgram
"""What a stage runs: all of the model, or only its weights."""


class Step:
    """Runs a program's stages forward and backward, micro-batch after micro-batch or as the pipeline does.

    received  bytes of the buffers that a pipeline receives into
    saved, first  see `StepMemory`
    """

    def __init__(self, job: Job, place: Place, state: Replicated | Sharded, program: Program):
        self.job, self.place, self.state, self.program, self.t = job, place, state, program, program.t
        recompute = job.training.recompute
        self.stages = {
            number: _Stage(program, state, parts, recompute)
            for number, parts in parts_of(job, place.pp).items()
        }
        self.received = self.saved = self.first = 0

    def replay(self) -> None:
        t, setup = self.t, Setup.of(self.job)
        repeats = passes(setup)
        if setup.pp > 1:
            Pipelined(self, repeats).replay()
            return
        total = t.empty(1, max(WIDE, setup.precision.compute_bytes))
        for number in range(repeats):
            self.state.last = number == repeats - 1
            loss = self.stages[0].forward(self.program.batch())
            if number == 0:
                self.saved = int(t.now) - total.width - loss.width - self.state.gathered
                self.first = int(t.peak) - total.width
            t.backward(loss, t.like(loss))
            self.state.after_backward()


class _Stage:
    """The layers of one stage, with what happens to their weights around them."""

    def __init__(self, program: Program, state: Replicated | Sharded, parts: list[str], recompute: str):
        self.program, self.state = program, state
        layers = {part: state.around(part, program.layer(part)) for part in parts}
        self.embedding, self.head = layers.pop("embedding", None), layers.pop("head", None)
        self.run_blocks = blocks_runner(program.t, list(layers.values()), recompute)
        self.run = state.around("root", self._run)

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
        x = self.run_blocks(x, self.program.rope())
        return x if self.head is None else self.head(x, targets)


class Pipelined:
    """Replays a rank's list of actions, as torch's runtime runs it (2.11 to 2.13).

    It receives into buffers that are there from one step to the next, one for every stage and micro-batch and
    for either direction. Between two stages of one rank the tensor itself takes the buffer's place.
    """

    def __init__(self, step: Step, repeats: int):
        self.step, self.t, self.repeats = step, step.t, repeats
        job = step.job
        self.last = stage_count(job) - 1
        self.actions = actions(job)[step.place.pp]
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        for stage, number in product(step.stages, range(repeats)):
            if stage > 0:
                self.inputs[stage, number] = step.program.stream()
            if stage < self.last:
                self.gradients[stage, number] = step.program.stream()
        self.outputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.made: dict[tuple[int, int], Tensor] = {}
        self.halfway: dict[tuple[int, int], Halfway] = {}
        self.losses: list[Tensor] = []

    def replay(self) -> None:
        self.step.received = int(self.t.now)
        batches = [self.step.program.batch() for _ in range(self.repeats)]
        splits = self.step.program.splits_backward
        self.step.state.before_schedule()
        for action in self.actions:
            key = action.stage, action.micro_batch
            if action.kind == "forward":
                self._forward(*key, batches[action.micro_batch])
            elif action.kind == "backward" or (action.kind == "backward-input" and not splits):
                self._backward(*key)
            elif action.kind == "backward-input" and action.stage > 0:
                self._backward_input(*key)
            elif action.kind == "backward-weight" and splits:
                self._backward_weight(*key)
            elif action.kind == "send-gradient":
                self.made.pop(key, None)
            elif action.kind == "reduce":
                self.step.state.reduce(action.stage)

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
        result, x = self.outputs.pop((stage, number))
        gradient = self._gradient(stage, number, result)
        self.losses = [loss for loss in self.losses if loss is not result]
        self.halfway[stage, number] = self.t.backward_input(result, gradient, x)
        self.step.state.after_backward()

    def _backward_weight(self, stage: int, number: int) -> None:
        if stage == 0:  # there is no input to differentiate by
            self._backward(stage, number)
            return
        self.step.state.before_weights()
        self.t.backward_weights(self.halfway.pop((stage, number)))
        self.step.state.after_weights()
