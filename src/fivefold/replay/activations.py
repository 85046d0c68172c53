"""Activations of one part of the model, for one micro-batch on one rank: replayed, not estimated.

Its forward and backward are replayed on a tape (see `tape`, `program`), under the setup's recomputation.
Sizes may be arrays over many layouts; those that run different operations are replayed apart.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np

from fivefold.ledger.setup import Figure, Number, Setup
from fivefold.replay.graph import INPUT, Tensor
from fivefold.replay.operations import INTEGER, Operations
from fivefold.replay.program import embedding, head, rotary_tables, several_blocks
from fivefold.replay.sizes import SHAPES, Sizes

DEVICE = "cuda"
"""Whose kernels: they differ in what they keep (see `operations`)."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one part and one micro-batch.

    saved          what stays between its forward and its backward: its output does not count
    input          of this, its input
    forward_peak   the most alive while forward runs, beyond what was there before it (its input was)
    backward_peak  the most alive while backward runs, beyond what was there before it: what is saved was, and
                   so was the gradient of its output. Gradients of weights count until they are complete, in
                   the compute dtype; then the state of the step counts them (see `step`).
    with_gradients the same where complete gradients stay until the part's backward is through
    half_done      what stays between the two halves of a backward that is cut, in place of `saved`; with the
                   gradient of its output
    half_peak      as `backward_peak`, of the first of those halves, which frees nothing that was saved
    """

    saved: Figure
    forward_peak: Figure
    backward_peak: Figure
    with_gradients: Figure
    input: Figure = 0.0
    half_done: Figure = 0.0
    half_peak: Figure = 0.0


def block_activations(setup: Setup, device: str = DEVICE, blocks: int = 1) -> Activations:
    """One block; or several neighbours, recomputed together where the setup recomputes whole layers."""

    def play(t: Operations, sizes: Sizes) -> Activations:
        rope = rotary_tables(t, sizes)

        def run(x: Tensor) -> Tensor:
            return several_blocks(t, sizes, x, rope, blocks, selective=setup.recompute == "selective")

        def run_again(x: Tensor) -> Tensor:
            return t.checkpoint(run, x)

        whole = run_again if setup.recomputes_layers else run
        return _played(t, sizes.stream, sizes.width, whole, setup.can_split_backward)

    return _all_played(play, setup, device)


def embedding_activations(setup: Setup, device: str = DEVICE) -> Activations:
    """The embedding, with tokens and positions; and the rotary tables, which all blocks of a stage share."""

    def play(t: Operations, sizes: Sizes) -> Activations:
        positions = t.empty(sizes.tokens // sizes.rows, INTEGER)
        found = _played(t, sizes.tokens, INTEGER, lambda tokens: embedding(t, sizes, tokens, positions))
        kept = (positions,) if sizes.spec.positions == "learned" else rotary_tables(t, sizes) or ()
        tables = sum(table.size for table in kept)
        return replace(found, saved=found.saved + tables, forward_peak=found.forward_peak + tables)

    return _all_played(play, setup, device)


def head_activations(setup: Setup, device: str = DEVICE) -> Activations:
    """The last norm, the output projection and the loss, with the targets."""

    def play(t: Operations, sizes: Sizes) -> Activations:
        targets = t.empty(sizes.tokens, INTEGER)

        def run(x: Tensor) -> Tensor:
            return head(t, sizes, x, targets)

        found = _played(t, sizes.stream, sizes.width, run, setup.can_split_backward)
        return replace(found, saved=found.saved + targets.size)

    return _all_played(play, setup, device)


def _all_played(play: Callable[[Operations, Sizes], Activations], setup: Setup, device: str) -> Activations:
    """Layouts that run the same operations together; their answers side by side."""
    numbers = np.broadcast_arrays(*(getattr(setup, name) for name in SHAPES))
    flat: dict[str, Any] = {name: number.ravel() for name, number in zip(SHAPES, numbers, strict=True)}
    answers = np.zeros((len(fields(Activations)), numbers[0].size))
    for places, sizes in Sizes(replace(setup, **flat)).alike():
        found = play(Operations(device), sizes)
        for answer, figure in zip(answers, astuple(found), strict=True):
            answer[places] = figure
    return Activations(*answers.reshape(-1, *numbers[0].shape))


def _played(
    t: Operations,
    elements: Number,
    width: int,
    run: Callable[[Tensor], Tensor],
    splits_backward: bool = False,
) -> Activations:
    """Forward and backward of something that takes a tensor of `elements` elements."""
    nothing = t.now
    x = [t.empty(elements, width)]
    x[0].edge = None if width == INTEGER else INPUT
    before = t.peak = t.now
    result = run(x[0])
    forward_peak = t.peak - before
    alive = t.now
    x.clear()  # gone, unless it was saved
    saved = t.now - nothing - result.size
    kept = elements * width - (alive - t.now)
    half_done: Figure = 0.0
    half_peak: Figure = 0.0
    if splits_backward:
        start = t.peak = t.now + result.size
        waiting = t.backward(result, halfway=True)
        half_done, half_peak = t.now - nothing - result.size, t.peak - start
        del waiting
    start = t.peak = t.peak_complete = t.now + result.size  # with the gradient of the result
    t.backward(result)
    return Activations(
        saved, forward_peak, t.peak - start, t.peak_complete - start, kept, half_done, half_peak
    )
