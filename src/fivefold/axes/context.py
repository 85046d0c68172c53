"""The context axis: every rank holds a part of each sequence, and attention reaches across the ranks.

    ring       keys and values travel from rank to rank under the attention to those that are there already
    allgather  keys and values are gathered before attention, and again in backward
    ulysses    tokens are exchanged for heads: each rank attends for some heads over the whole sequence

Ring and allgather hold the sequence in zigzag chunks (`zigzag`), which makes causal work even; ulysses holds
consecutive parts. To the weights, context ranks are data ranks.
"""

import math
from dataclasses import replace

import numpy as np

from fivefold.axes.rules import not_of_own_models, rule
from fivefold.ledger.ledger import Message, Operation
from fivefold.ledger.setup import Number, Setup
from fivefold.problems import nearest_multiples


def _parts(setup: Setup) -> Number:
    """How many equal parts a sequence is cut into."""
    return setup.cp if setup.cp_kind == "ulysses" else 2 * setup.cp


@rule("training.seq_len", lambda setup: (setup.cp == 1) | (setup.seq_len % _parts(setup) == 0))
def _sequence(setup: Setup) -> tuple[str, str]:
    cp, kind, length = setup.cp, setup.cp_kind, setup.seq_len
    cut = f"{cp} consecutive parts" if kind == "ulysses" else f"2 x {cp} chunks, two for each rank"
    message = f"{length} does not divide into {cut} (layout.cp = {cp}, layout.cp_kind = '{kind}')"
    lengths = nearest_multiples(length, int(_parts(setup)), setup.spec.max_seq_len)
    return message, f"Use training.seq_len = {lengths}." if lengths else "Use a smaller layout.cp."


@rule("layout.cp", lambda setup: setup.cp_kind != "ulysses" or setup.spec.heads % (setup.cp * setup.tp) == 0)
def _heads(setup: Setup) -> tuple[str, str]:
    heads, cp, tp = setup.spec.heads, int(setup.cp), int(setup.tp)
    degrees = f"layout.cp = {cp}" + (f" x layout.tp = {tp}" if tp > 1 else "")
    fitting = [n for n in range(1, cp) if heads % (n * tp) == 0]
    choices = [f"layout.cp = {fitting[-1]}"] if fitting else []
    choices += ["layout.cp_kind = 'ring'"] if _kernel.allows(setup, cp_kind="ring") else []
    message = f"{heads} heads do not split over {degrees} under layout.cp_kind = 'ulysses'"
    choices += [f"model.heads = {nearest_multiples(heads, cp * tp)}"]
    return message, f"Use {', or '.join(choices)}."


def _is_plain(setup: Setup) -> bool:
    """Whether attention has neither a window nor a soft cap."""
    return (setup.spec.sliding_window or setup.seq_len) >= setup.seq_len and not setup.spec.attention_softcap


@rule("layout.cp_kind", lambda setup: setup.cp_kind == "ulysses" or _is_plain(setup) or setup.cp == 1)
def _kernel(setup: Setup) -> tuple[str, str]:
    key = "attention_softcap" if setup.spec.attention_softcap else "sliding_window"
    message = f"'{setup.cp_kind}' with model.{key} = {getattr(setup.spec, key)}"
    return message, "Use layout.cp_kind = 'ulysses', which attends over whole sequences."


RULES = (not_of_own_models("cp", "tokens look at each other"), _sequence, _heads, _kernel)


def block_messages(setup: Setup) -> list[Message]:
    """The attention of one block, one micro-batch. Selective recomputation keeps what messages brought."""
    spec, ranks, size = setup.spec, setup.cp, setup.precision.compute_bytes
    head = setup.tokens * spec.head_dim  # elements of one head
    kv = 2 * setup.kv_heads * head
    kv_bytes, grad_bytes = kv * size, kv * max(4, size)  # gradients are added up in float32 or wider

    def over_cp(operation: Operation, payload: Number, count: Number = 1) -> Message:
        under = "attention" if setup.cp_kind == "ring" else None
        return Message(operation, payload, "cp", ranks, count, "forward", under)

    if setup.cp_kind == "ring":
        forward = [over_cp("send", kv_bytes, ranks - 1), over_cp("recv", kv_bytes, ranks - 1)]
        backward = [*forward, over_cp("send", grad_bytes, ranks), over_cp("recv", grad_bytes, ranks)]
    elif setup.cp_kind == "allgather":
        forward = [over_cp("all_gather", kv_bytes * ranks)]
        backward = [*forward, over_cp("reduce_scatter", grad_bytes * ranks)]
    else:
        heads = spec.heads // setup.tp
        sent = heads + 2 * sent_kv_heads(setup.kv_heads, ranks)
        forward = backward = [over_cp("all_to_all", n * head * size) for n in (sent, heads)]
    again = forward if setup.recomputes_layers else []
    return [*forward, *(replace(message, phase="backward") for message in (*again, *backward))]


def sent_kv_heads(kv_heads: Number, cp: Number) -> Number:
    """How many key heads ulysses deals out: as many to each rank, so some go to several ranks if need be."""
    if isinstance(kv_heads, int) and isinstance(cp, int):
        return math.lcm(kv_heads, cp)
    return np.lcm(kv_heads, cp)
