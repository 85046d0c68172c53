"""What tp ranks put in place of a model's layers, on tensors that have only a size: see `program`.

The counterpart of `tensor_layers.py` and `vocabulary.py` in `axes/runtime/`, and of `comm/collectives.py`.
"""

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Gradients, Tensor
from fivefold.replay.operations import INTEGER, Operations, passed_on
from fivefold.replay.sizes import Sizes

FLAG = 1
"""Bytes of a truth value."""


def enter(t: Operations, sizes: Sizes, x: Tensor) -> Tensor:
    """From the residual stream into a layer that the ranks compute together."""
    if not sizes.sequence_parallel:
        return t.record(x.detached(), [x])
    whole = _sent(t, sizes, x, sizes.whole, sizes.turned_stream)
    return t.contiguous(whole) if sizes.turned_stream else whole


def leave(t: Operations, sizes: Sizes, x: Tensor) -> Tensor:
    """From such a layer back into the stream."""
    if not sizes.sequence_parallel:
        return t.record(t.costly(x.elements, x.width), [x], passed_on)
    # A gradient keeps the order of its message through the stream, but for layer norms.
    turned_back = sizes.turned_stream and sizes.spec.norm == "layernorm"
    return _sent(t, sizes, x, sizes.stream, turned_back)


def _sent(t: Operations, sizes: Sizes, x: Tensor, elements: Number, turned_back: bool) -> Tensor:
    """A message that makes `elements` of `x`; backward the opposite one, of a gradient that is brought into
    its order first where it is `turned_back`.
    """
    before = x.elements
    first = t.like(x) if sizes.turned_stream else x
    result = t.costly(elements, x.width)
    del first

    def backward(g: Tensor) -> Gradients:
        first = t.like(g) if turned_back else g
        return [t.empty(before, first.width)]

    return t.record(result, [x], backward)


def own_rows(t: Operations, tokens: Number) -> tuple[Tensor, Tensor]:
    """Which row of this rank's part of the vocabulary each token is, and whether it is one."""
    rows, mine = t.empty(tokens, INTEGER), t.empty(tokens, FLAG)
    return t.like(rows), mine


def vocabulary_embedding(t: Operations, sizes: Sizes, weight: Tensor) -> Tensor:
    """Looks up the tokens that are this rank's; the others' rows come from the ranks that have them."""
    rows, mine = own_rows(t, sizes.tokens)
    left = leave(t, sizes, t.scale(t.embedding(weight, rows, sizes.whole), mine))
    return t.contiguous(left) if sizes.sequence_parallel else left


def vocabulary_loss(t: Operations, sizes: Sizes, logits: Tensor, targets: Tensor) -> Tensor:
    """The summed cross entropy of logits that are spread over ranks; probabilities are made in backward."""
    tokens, wide = sizes.tokens, sizes.wide
    elements, width = logits.elements, logits.width

    def backward(g: Tensor) -> Gradients:
        own = own_rows(t, tokens)
        gradient = t.empty(elements, wide)
        if width != wide:  # a copy in the wide dtype comes before
            gradient = t.like(gradient)
        signs = t.empty(tokens, wide)
        minus = t.like(signs)
        del signs, minus
        scale = t.empty(tokens, wide)
        found: Gradients = [t.cast(gradient, width)]
        del own, scale
        return found

    raised = t.cast(logits.detached(), wide)
    largest = t.empty(tokens, wide)
    shifted = t.like(raised)
    rows, mine = own_rows(t, tokens)
    own_target = t.like(t.empty(tokens, wide))
    both = t.empty(2 * tokens, wide)
    totals = t.like(both)
    del both
    log_total = t.empty(tokens, wide)
    saved = t.save(logits, t.empty(tokens, wide), targets)
    counted, differences = t.empty(tokens, FLAG), t.like(log_total)
    chosen = t.like(differences)
    del counted, differences
    total = t.empty(1, wide)
    del chosen, raised, shifted, rows, mine, own_target, totals, log_total, largest
    return t.record(total, [logits], backward, saved)
