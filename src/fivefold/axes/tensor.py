"""The tensor axis: `tp` ranks compute every layer together, each with a part of its matrices.

    first projections (query, key, value, gate, up)   by output: each rank makes some heads, some hidden units
    second projections (output, down)                 by input: each rank makes a partial sum of the result
    token embedding and output projection             by vocabulary: no rank ever holds all logits
    norms, learned positions, second biases, router   whole on every rank

Between the layers, ranks share the residual stream along the sequence (`layout.sequence_parallel`):

    stream [B, S/tp, dim]  norm, all-gather  [B, S, dim]  layer  partial sums  reduce-scatter  [B, S/tp, dim]

Without it every rank holds all of the stream, and partial sums are all-reduced: as many bytes on the wire.
"""

from fivefold.axes.rules import Rule, not_of_own_models, rule
from fivefold.ledger.ledger import Message, Operation, Phase
from fivefold.ledger.numbers import divided_up, divisors
from fivefold.ledger.setup import Setup
from fivefold.models.spec import ModelSpec
from fivefold.problems import either, nearest_multiples

SPLIT_BY_OUTPUT = ("embedding.tokens", "head.output", ".attention.query", ".gate", ".up")
SPLIT_BY_INPUT = (".attention.output", ".down")
OF_KEY_VALUE_HEADS = (".attention.key", ".attention.value")
OF_A_RANKS_HEADS = (*OF_KEY_VALUE_HEADS, ".attention.query_norm", ".attention.key_norm")
OF_THE_STREAM = (".attention_out_norm", ".mlp_out_norm")
OF_A_PARTIAL_SUM = (".mlp.router", ".mlp.experts.down", ".mlp.shared.down")


def split_dimension(spec: ModelSpec, name: str, tp: int) -> int | None:
    """Along which dimension `tp` ranks split the parameter `name`; None where each holds all of it.

    With more ranks than key and value heads, several ranks use one head, and all hold all of them.
    """
    if tp == 1:
        return None
    layer, _, kind = name.rpartition(".")
    if layer.endswith(OF_KEY_VALUE_HEADS):
        return 0 if spec.kv_heads % tp == 0 else None
    first = 1 if ".mlp.experts." in name else 0  # experts are stacked along dimension 0
    if layer.endswith(SPLIT_BY_OUTPUT):
        return first
    if layer.endswith(SPLIT_BY_INPUT) and kind == "weight":
        return first + 1
    return None


def gradient_is_partial(spec: ModelSpec, name: str, tp: int, sequence_parallel: bool) -> bool:
    """Whether each tp rank holds this parameter whole and computes only its share of the gradient.

    Norms see a rank's own tokens, say. Those gradients are summed over tp once a step, after backward.
    """
    if tp == 1 or split_dimension(spec, name, tp) is not None:
        return False
    layer = name.rpartition(".")[0]
    return sequence_parallel or layer.endswith(OF_A_RANKS_HEADS) or layer.endswith(OF_A_PARTIAL_SUM)


def _even(name: str) -> Rule:
    """All ranks get as many of the model's heads, or hidden units."""

    @rule("layout.tp", lambda setup: getattr(setup.spec, name) % setup.tp == 0)
    def even(setup: Setup) -> tuple[str, str]:
        tp, size = int(setup.tp), getattr(setup.spec, name)
        fixes = f"layout.tp = {either(divisors(size))}, or model.{name} = {nearest_multiples(size, tp)}"
        return f"{tp} ranks cannot share model.{name} = {size} evenly", f"Use {fixes}."

    return even


@rule(
    "layout.tp",
    lambda setup: (setup.spec.kv_heads % setup.tp == 0) | (setup.tp % max(1, setup.spec.kv_heads) == 0),
)
def _kv_heads(setup: Setup) -> tuple[str, str]:
    fitting = [tp for tp in divisors(setup.spec.heads) if _kv_heads.allows(setup, tp=tp)]
    message = f"{setup.tp} neither divides model.kv_heads = {setup.spec.kv_heads} nor is a multiple of it"
    return message, f"Use layout.tp = {either(fitting)}."


@rule(
    "layout.tp",
    lambda setup: divided_up(setup.spec.vocab_size, setup.tp) * (setup.tp - 1) < setup.spec.vocab_size,
)
def _vocabulary(setup: Setup) -> tuple[str, str]:
    size, tp = setup.spec.vocab_size, int(setup.tp)
    most = max(fewer for fewer in range(1, tp) if _vocabulary.allows(setup, tp=fewer))
    message = f"{tp} ranks cannot share model.vocab_size = {size}: the last one would get nothing"
    return message, f"Use layout.tp = {most} or fewer, or model.vocab_size = {divided_up(size, tp) * tp}."


@rule(
    "training.seq_len",
    lambda setup: (
        not setup.sequence_parallel or (setup.tp == 1) | (setup.seq_len % (setup.cp * setup.tp) == 0)
    ),
)
def _sequence(setup: Setup) -> tuple[str, str]:
    cp, tp, length = int(setup.cp), int(setup.tp), setup.seq_len
    among = f"{cp} x {tp} ranks of cp and tp" if cp > 1 else f"{tp} ranks"
    lengths = nearest_multiples(length, cp * tp, setup.spec.max_seq_len)
    hint = f"Use training.seq_len = {lengths}, or " if lengths else "Use "
    hint += "layout.sequence_parallel = false."
    return f"{length} tokens cannot be shared evenly by {among}", hint


@rule(
    "communication.tp_overlap",
    lambda setup: not setup.tp_overlap or setup.sequence_parallel or setup.tp == 1,
)
def _overlap(setup: Setup) -> tuple[str, str]:
    message = "true, but without sequence parallelism there are no gathers and reduce-scatters to overlap"
    return message, "Leave it out, or use layout.sequence_parallel = true."


_own_model = not_of_own_models("tp", "matrices could be cut")
RULES = (_own_model, _even("heads"), _even("ffn"), _kv_heads, _vocabulary, _sequence, _overlap)


def block_messages(setup: Setup, closes_segment: bool = True) -> list[Message]:
    """One block, one micro-batch. With overlap those inside torch's fused operators hide behind its products;
    they travel inside those operators, where a tracer does not see them.

    closes_segment  of layers that are recomputed together, this one is the last: nothing that backward needs
                    comes after its last reduction (but a norm's input), which is therefore not run again
    """
    experts = setup.spec.experts is not None
    # Whether overlap reaches the entrance and the exit of attention, then of the feed-forward layer.
    # It reaches neither of experts, and in a parallel block both enter together.
    entrances = [not experts] if setup.spec.parallel_block else [True, not experts]
    exits = [True, not experts]
    again = setup.recomputes_layers
    found = []
    for reached in (True, False):
        gathers, reductions = entrances.count(reached), exits.count(reached)
        spared = closes_segment and not setup.spec.norm_after and exits[-1] == reached
        under = "matmul" if setup.tp_overlap and reached else None
        repeated = gathers * again, (reductions - spared) * again
        found += _stream_messages(setup, gathers, reductions, repeated, under)
    return found


def embedding_messages(setup: Setup) -> list[Message]:
    """One micro-batch: each rank looks up the tokens of its vocabulary."""
    return _stream_messages(setup, gathers=0, reductions=1)


def head_messages(setup: Setup) -> list[Message]:
    """One micro-batch: all tokens meet each rank's vocabulary, and the loss is made from what they found."""
    found = _stream_messages(setup, gathers=1, reductions=0)
    for tokens, count in setup.loss_chunks:
        scalars = tokens * max(4, setup.precision.compute_bytes)  # logits are summed up in float32 at least
        # The largest logit of each token; then its sum of exponentials and its target's logit.
        found.append(Message("all_reduce", scalars, "tp", setup.tp, count, "forward"))
        found.append(Message("all_reduce", 2 * scalars, "tp", setup.tp, count, "forward"))
    return found


def _stream_messages(
    setup: Setup, gathers: int, reductions: int, again: tuple[int, int] = (0, 0), under: str | None = None
) -> list[Message]:
    """The stream is gathered and partial sums are reduced; in backward each becomes the other.

    again  how many gathers and reductions recomputation repeats
    """
    stream = setup.tokens * setup.spec.dim * setup.precision.compute_bytes

    def over_tp(operation: Operation, forward: int, backward: int) -> list[Message]:
        counts: dict[Phase, int] = {"forward": forward, "backward": backward}
        return [Message(operation, stream, "tp", setup.tp, n, phase, under) for phase, n in counts.items()]

    reduced = reductions, again[1] + gathers
    if not setup.sequence_parallel:
        return over_tp("all_reduce", *reduced)
    return over_tp("all_gather", gathers, again[0] + reductions) + over_tp("reduce_scatter", *reduced)
