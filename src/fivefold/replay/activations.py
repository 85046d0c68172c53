"""Activations of one part of the model, for one micro-batch on one rank: replayed, not estimated.

Its forward and backward are replayed on a tape (see `tape`, `program`), under the setup's recomputation.
Sizes may be arrays over many layouts; those that run different operations are replayed apart.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np

from fivefold.axes.context import sent_kv_heads
from fivefold.ledger.setup import Figure, Number, Setup
from fivefold.replay.compiled import compiled_block, compiled_head
from fivefold.replay.graph import Tensor
from fivefold.replay.layers_program import Layer, Parameters, rotary_tables
from fivefold.replay.operations import INTEGER, Operations
from fivefold.replay.program import Block, Embedding, Head, blocks_runner, selected
from fivefold.replay.sizes import MOST_STEPS, Sizes

P = ParamSpec("P")
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
    """

    saved: Figure
    forward_peak: Figure
    backward_peak: Figure
    with_gradients: Figure
    input: Figure = 0.0
    half_done: Figure = 0.0


# --- many layouts at once ----------------------------------------------------------------------------------


def _by_structure(
    replay: Callable[Concatenate[Setup, P], Activations],
) -> Callable[Concatenate[Setup, P], Activations]:
    """Replay layouts that run the same operations together, and put the answers side by side."""

    @wraps(replay)
    def replay_all(setup: Setup, /, *args: P.args, **options: P.kwargs) -> Activations:
        numbers = {f.name: getattr(setup, f.name) for f in fields(setup)}
        arrays = {name: value for name, value in numbers.items() if isinstance(value, np.ndarray)}
        if not arrays:
            return replay(setup, *args, **options)
        shape = np.broadcast_shapes(*(value.shape for value in arrays.values()))
        flat: dict[str, Any] = {name: np.broadcast_to(value, shape).ravel() for name, value in arrays.items()}
        keys = _structure(replace(setup, **flat))
        answers = {f.name: np.zeros(keys.shape[1]) for f in fields(Activations)}
        for key in np.unique(keys, axis=1).T:
            chosen = np.flatnonzero((keys == key[:, None]).all(axis=0))
            some: dict[str, Any] = {name: value[chosen] for name, value in flat.items()}
            found = replay(replace(setup, **some), *args, **options)
            for name, answer in answers.items():
                answer[chosen] = getattr(found, name)
        return Activations(**{name: answer.reshape(shape) for name, answer in answers.items()})

    return replay_all


def _structure(setup: Setup) -> Any:
    """What decides which operations a layout runs: one column a layout."""
    spec = setup.spec
    heads = spec.heads // setup.tp
    decisive: list[Any] = [
        np.minimum(setup.tp, 2),
        spec.kv_heads % setup.tp == 0,
        np.minimum(setup.cp, MOST_STEPS),
        np.minimum(setup.ep, 2),
        np.minimum(setup.micro_batch, 2),
        np.minimum(heads, 2),
        np.minimum(setup.kv_heads, 2),
    ]
    if setup.cp_kind:
        decisive.append(heads == setup.kv_heads)
    if setup.cp_kind == "ulysses":
        sent = sent_kv_heads(setup.kv_heads, setup.cp)
        decisive += [sent > setup.kv_heads, heads == setup.cp, sent == setup.cp]
    return np.stack(np.broadcast_arrays(*decisive)).astype(int)


# --- the parts ---------------------------------------------------------------------------------------------


@_by_structure
def block_activations(setup: Setup, device: str = DEVICE, blocks: int = 1) -> Activations:
    """One block; or several neighbours, recomputed together where the setup recomputes whole layers."""
    t, sizes = Operations(device), Sizes(setup)
    rope = rotary_tables(t, sizes)
    layers: list[Layer] = [Block(Parameters(t, sizes)) for _ in range(blocks)]
    if setup.recompute == "selective":
        layers = [selected(t, layer) for layer in layers]
    together = f"every-{blocks}" if setup.recomputes_layers else setup.recompute
    run = blocks_runner(t, layers, together)
    eager = _replayed(t, sizes.stream, sizes.width, lambda x: run(x, rope))
    if setup.can_split_backward:
        half = _half_done(t, sizes.stream, sizes.width, lambda x: run(x, rope))
        eager = replace(eager, half_done=half)
    return compiled_block(eager, setup) if setup.compile and device == "cuda" and blocks == 1 else eager


@_by_structure
def embedding_activations(setup: Setup, device: str = DEVICE) -> Activations:
    """The embedding, with tokens and positions; and the rotary tables, which all blocks of a stage share."""
    t, sizes = Operations(device), Sizes(setup)
    embedding = Embedding(Parameters(t, sizes))
    positions = t.empty(sizes.tokens // sizes.rows, INTEGER)
    found = _replayed(t, sizes.tokens, INTEGER, lambda tokens: embedding(tokens, positions))
    kept = (positions,) if sizes.spec.positions == "learned" else rotary_tables(t, sizes) or ()
    tables = sum(table.elements * table.width for table in kept)
    return replace(found, saved=found.saved + tables, forward_peak=found.forward_peak + tables)


@_by_structure
def head_activations(setup: Setup, device: str = DEVICE) -> Activations:
    """The last norm, the output projection and the loss, with the targets."""
    t, sizes = Operations(device), Sizes(setup)
    head = Head(Parameters(t, sizes))
    targets = t.empty(sizes.tokens, INTEGER)
    found = _replayed(t, sizes.stream, sizes.width, lambda x: head(x, targets))
    eager = replace(found, saved=found.saved + targets.elements * targets.width)
    if setup.can_split_backward:
        half = _half_done(t, sizes.stream, sizes.width, lambda x: head(x, targets))
        eager = replace(eager, half_done=half)
    return compiled_head(eager, setup) if setup.compile and device == "cuda" else eager


def _half_done(t: Operations, elements: Number, width: int, run: Callable[[Tensor], Tensor]) -> Figure:
    """What is alive between the gradients of inputs and those of weights."""
    nothing = t.now
    x = t.leaf(t.empty(elements, width), list.clear)
    result = run(t.view(x))
    output, gradient = result.elements * result.width, t.like(result)
    halfway = t.backward_input(result, gradient, x)
    del result, gradient, x
    found = t.now - nothing - output
    t.backward_weights(halfway)
    return found


def _replayed(t: Operations, elements: Number, width: int, run: Callable[[Tensor], Tensor]) -> Activations:
    """Forward and backward of something that takes a tensor of `elements` elements."""
    nothing = t.now
    x = [t.empty(elements, width, needs_gradient=width != INTEGER)]
    before = t.now
    t.peak = t.now
    result = run(x[0])
    forward_peak = t.peak - before
    alive = t.now
    x.clear()  # gone, unless it was saved
    saved = t.now - nothing - result.elements * result.width
    kept = elements * width - (alive - t.now)
    gradient = [t.like(result)]
    start = t.now
    t.peak = t.peak_complete = t.now
    t.backward(result, gradient.pop())
    return Activations(saved, forward_peak, t.peak - start, t.peak_complete - start, kept)
