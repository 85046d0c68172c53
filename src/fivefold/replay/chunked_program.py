"""The loss chunk by chunk of tokens, on tensors that have only a size: see `program`.

The counterpart of `models/chunked_loss.py`, on one rank or with the vocabulary spread over tp ranks.
"""

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Tensor
from fivefold.replay.operations import Operations
from fivefold.replay.shared_program import FLAG, own_rows
from fivefold.replay.sizes import Sizes


def chunked_loss(t: Operations, sizes: Sizes, x: Tensor, weight: Tensor) -> Tensor:
    """The summed loss, with the gradients of x and weight, which wait for backward."""
    x = t.view(x)
    x_gradient, weight_gradient = t.empty(x.elements, sizes.wide), t.empty(weight.elements, sizes.wide)
    total = t.empty(1, sizes.wide)
    _one_chunk(t, sizes)  # others are as large, or smaller
    of_weight = with_gradient(t, weight, weight_gradient, sizes.wide)
    of_x = with_gradient(t, x, x_gradient, sizes.wide)
    del total
    return t.add(of_x, of_weight)


def with_gradient(t: Operations, of: Tensor, gradient: Tensor, wide: int) -> Tensor:
    """A scalar of which a gradient is known."""
    return t.record(t.empty(1, wide), [of], saved=t.save(gradient))


def _one_chunk(t: Operations, sizes: Sizes) -> None:
    logits = t.empty(sizes.chunk * sizes.vocabulary, sizes.width)
    gradient = _cross_entropy(t, sizes, logits)
    del logits
    dim = sizes.spec.dim
    _product(t, sizes, gradient.elements, sizes.vocabulary * dim)
    _product(t, sizes, gradient.elements, sizes.chunk * dim)


def _product(t: Operations, sizes: Sizes, one: Number, other: Number) -> None:
    """Into a tensor that is there; CPUs want both factors in its dtype."""
    if t.device == "cpu" and sizes.width != sizes.wide:
        copies = t.empty(one, sizes.wide), t.empty(other, sizes.wide)
        del copies


def _cross_entropy(t: Operations, sizes: Sizes, logits: Tensor) -> Tensor:
    """The gradient of a chunk's logits, and numbers of its tokens beside it on the way."""
    tokens, wide = sizes.chunk, sizes.wide
    x, slope = t.cast(logits, wide), None
    if sizes.spec.final_softcap is not None:
        slope = t.like(x)
        x = t.like(x)
    rows, mine = own_rows(t, tokens)
    counted = t.empty(tokens, FLAG)
    numbers = t.empty(3 * tokens, wide), t.empty(2 * tokens, wide)
    gradient = t.cast(x, sizes.width)
    del rows, mine, counted, numbers, slope
    return gradient
