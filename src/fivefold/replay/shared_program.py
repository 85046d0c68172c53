"""What tp ranks put in place of a model's layers, on tensors that have only a size: see `program`.

The counterpart of `tensor_layers.py` and `vocabulary.py` in `axes/runtime/`, and of `comm/collectives.py`.
"""

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Gradients, Tensor
from fivefold.replay.operations import Operations, passed_on
from fivefold.replay.segments import Saved
from fivefold.replay.sizes import Sizes

FLAG = 1
"""Bytes of a truth value."""


class Stream:
    """How tp ranks hold the residual stream between layers."""

    def __init__(self, t: Operations, sizes: Sizes):
        self.t, self.sizes = t, sizes
        # Messages want a rank's tokens together: [S, B, dim]. With one row that is no other order.
        self.turns = not sizes.one_row

    def enter(self, x: Tensor) -> Tensor:
        """From the stream into a layer that the ranks compute together."""
        if not self.sizes.sequence_parallel:
            return self.t.record(x.detached(), [x])
        whole = self._sent(x, self.sizes.whole, self.turns)
        return self.t.contiguous(whole) if self.turns else whole

    def leave(self, x: Tensor) -> Tensor:
        """From such a layer back into the stream."""
        if not self.sizes.sequence_parallel:
            return self.t.record(self.t.costly(x.elements, x.width), [x], passed_on)
        # A gradient keeps the order of its message through the stream, but for layer norms.
        turned_back = self.turns and self.sizes.spec.norm == "layernorm"
        return self._sent(x, self.sizes.stream, turned_back)

    @property
    def turned_gradient(self) -> bool:
        """Whether the gradient that comes to a layer from `leave` lies in another order than it wants."""
        return self.sizes.sequence_parallel and self.turns

    def _sent(self, x: Tensor, elements: Number, turned_back: bool) -> Tensor:
        """A message that makes `elements` of `x`; backward the opposite one, of a gradient that is brought
        into its order first where it is `turned_back`.
        """
        t, before = self.t, x.elements
        first = t.like(x) if self.turns else x
        result = t.costly(elements, x.width)
        del first

        def backward(g: list[Tensor], _: Saved) -> Gradients:
            first = t.like(g[0]) if turned_back else g[0]
            return [t.empty(before, first.width)]

        return t.record(result, [x], backward)


def own_rows(t: Operations, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Which row of this rank's part of the vocabulary each token is, and whether it is one."""
    rows = t.like(tokens)
    early = t.empty(tokens.elements, FLAG)
    late = t.empty(tokens.elements, FLAG)
    mine = t.empty(tokens.elements, FLAG)
    del early, late
    return t.like(rows), mine


def vocabulary_embedding(
    t: Operations, sizes: Sizes, stream: Stream, weight: Tensor, tokens: Tensor
) -> Tensor:
    """Looks up the tokens that are this rank's; the others' rows come from the ranks that have them."""
    rows, mine = own_rows(t, tokens)
    left = stream.leave(t.scale(t.embedding(weight, rows, sizes.whole), mine))
    return t.contiguous(left) if sizes.sequence_parallel else left


def vocabulary_loss(t: Operations, logits: Tensor, targets: Tensor, wide: int) -> Tensor:
    """The summed cross entropy of logits that are spread over ranks; probabilities are made in backward."""
    tokens, width = targets.elements, logits.width

    def backward(g: list[Tensor], saved: Saved) -> Gradients:
        own = own_rows(t, saved[2])
        gradient = t.empty(saved[0].elements, wide)
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
    part = t.empty(tokens, wide)
    largest = t.like(part)
    del part
    shifted = t.like(raised)
    rows, mine = own_rows(t, targets)
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
