"""Which linear layers compute in 8 bits (`training.fp8`): a rule by their shape on one rank.

What is too small gains less by its product than its casts cost, and stays in bfloat16, unless the job says
otherwise (`fp8_small`). Until own measurements replace it the rule is that of torchao for H100s.
"""

from typing import Literal

from fivefold.ledger.setup import Condition, Number, Setup

Fp8 = Literal["none", "tensorwise", "rowwise"]
MULTIPLE = 16
"""What kernels for 8 bits want to divide every side of a product."""
LEFT_OUT = "mlp.router"
"""A layer that never takes part: it computes in float32."""
EXPERTS = "mlp.experts."
"""How the names of expert layers begin: one product a group of tokens, and a group may have any size."""
HEAD = "head.output"
NARROW = 1
"""Bytes of a number in 8 bits."""


def takes_part(setup: Setup, what: str, inner: Number, columns: Number) -> Condition:
    """Whether a linear layer of `inner` inputs and `columns` outputs, on one rank, computes in 8 bits.

    Of an expert layer: of each expert. How many tokens it gets is known when it runs; what then is missing to
    a multiple is filled up with zeros.
    """
    if not may_take_part(setup, what):
        return False
    divides = (inner % MULTIPLE == 0) & (columns % MULTIPLE == 0)
    if not is_of_experts(what):
        divides = divides & (setup.tokens % MULTIPLE == 0)
    if what == HEAD:  # its last rank may have fewer
        divides = divides & (setup.spec.vocab_size % MULTIPLE == 0)
    return divides if setup.fp8_small else divides & pays(setup.fp8, inner, columns)


def may_take_part(setup: Setup, what: str) -> bool:
    """Whether its shape decides."""
    named = setup.fp8_head if what == HEAD else what != LEFT_OUT
    return setup.fp8 != "none" and named


def is_of_experts(what: str) -> bool:
    """Whether it is a layer of routed experts. (The shared one's are linear layers.)"""
    return what.startswith(EXPERTS)


def gathered(setup: Setup, what: str) -> bool:
    """Whether ZeRO gathers the weight of a layer in 8 bits, if the layer computes in these.

    A tied head's is gathered in bfloat16: the embedding looks it up. So are stacks of experts' weights.
    """
    in_bf16 = is_of_experts(what) or (what == HEAD and setup.spec.tied)
    return setup.gathers_in_8_bits and not in_bf16


def pays(scales: str, inner: Number, columns: Number) -> Condition:
    """Whether a product is large enough to gain more than its casts cost."""
    if scales == "tensorwise":
        return (inner > 4096) | (columns > 1024)
    return (columns > 2048) & (inner > 1024) & ((columns > 4096) | (inner > 2048))


def reason(setup: Setup, what: str, inner: int, columns: int) -> str:
    """Why a layer stays in bfloat16, of one layout."""
    if what == HEAD and not setup.fp8_head:
        return "training.fp8_head"
    if what == LEFT_OUT:
        return "in float32"
    sizes = {"inputs": inner, "outputs": columns}
    if not is_of_experts(what):
        sizes["tokens"] = int(setup.tokens)
    odd = next((name for name, size in sizes.items() if size % MULTIPLE), None)
    if odd is None and what == HEAD and setup.spec.vocab_size % MULTIPLE:
        odd, sizes["outputs"] = "outputs", setup.spec.vocab_size
    return "too small to gain" if odd is None else f"{sizes[odd]} {odd}: not a multiple of {MULTIPLE}"


def input_of(what: str) -> str:
    """What a layer reads, by a name that layers reading the same share."""
    part, _, name = what.rpartition(".")
    return part if name in ("query", "key", "value", "gate", "up") else what
