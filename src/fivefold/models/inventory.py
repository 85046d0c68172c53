"""Which parameters a model has: their names, shapes and place, from the spec alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.models.own.spec import OwnSpec, part_of
from fivefold.models.spec import ModelSpec

EMBEDDING = "embedding.tokens.weight"


@dataclass(frozen=True)
class Parameter:
    """One weight of the model.

    name   as `Decoder.named_parameters()` gives it
    shape  the whole tensor's
    part   "embedding", "blocks.3" or "head": what it is gathered, placed and recomputed with
    """

    name: str
    shape: tuple[int, ...]
    part: str

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def parameters(spec: ModelSpec) -> list[Parameter]:
    """Every parameter, in the order of `Decoder(spec).named_parameters()`. A tied output is not listed:
    it is `EMBEDDING`.
    """
    if isinstance(spec, OwnSpec):
        return [Parameter(name, shape, part_of(name)) for name, shape in spec.tensors]
    parts = [("embedding", _embedding(spec))]
    parts += [(f"blocks.{layer}", _block(spec)) for layer in range(spec.layers)]
    parts += [("head", _head(spec))]
    return [Parameter(f"{part}.{name}", shape, part) for part, entries in parts for name, shape in entries]


def parameter_count(spec: ModelSpec) -> int:
    """How many numbers are trained; a tied matrix counts once."""
    if isinstance(spec, OwnSpec):
        return sum(parameter.count for parameter in parameters(spec))
    outside = sum(math.prod(shape) for _, shape in [*_embedding(spec), *_head(spec)])
    return outside + spec.layers * sum(math.prod(shape) for _, shape in _block(spec))


Entries = Iterator[tuple[str, tuple[int, ...]]]


def _embedding(spec: ModelSpec) -> Entries:
    yield "tokens.weight", (spec.vocab_size, spec.dim)
    if spec.positions == "learned":
        yield "positions.weight", (spec.max_seq_len, spec.dim)


def _block(spec: ModelSpec) -> Entries:
    yield from _norm("attention_norm", spec)
    yield from _attention(spec)
    if spec.norm_after:
        yield from _norm("attention_out_norm", spec)
    if not spec.parallel_block:
        yield from _norm("mlp_norm", spec)
    yield from _mlp(spec)
    if spec.norm_after:
        yield from _norm("mlp_out_norm", spec)


def _attention(spec: ModelSpec) -> Entries:
    query_dim, kv_dim = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield from _linear("attention.query", query_dim, spec.dim, spec.qkv_bias)
    yield from _linear("attention.key", kv_dim, spec.dim, spec.qkv_bias)
    yield from _linear("attention.value", kv_dim, spec.dim, spec.qkv_bias)
    yield from _linear("attention.output", spec.dim, query_dim, spec.attention_out_bias)
    if spec.qk_norm:
        yield "attention.query_norm.weight", (spec.head_dim,)
        yield "attention.key_norm.weight", (spec.head_dim,)


def _mlp(spec: ModelSpec) -> Entries:
    if spec.experts is None:
        yield from _feed_forward("mlp", spec, spec.ffn)
        return
    yield "mlp.router.weight", (spec.experts, spec.dim)
    yield from _feed_forward("mlp.experts", spec, spec.ffn, (spec.experts,))
    if spec.shared_experts:
        yield from _feed_forward("mlp.shared", spec, spec.shared_experts * spec.ffn)


def _feed_forward(prefix: str, spec: ModelSpec, ffn: int, stack: tuple[int, ...] = ()) -> Entries:
    for name in ("gate", "up") if spec.gated else ("up",):
        yield from _linear(f"{prefix}.{name}", ffn, spec.dim, spec.mlp_bias, stack)
    yield from _linear(f"{prefix}.down", spec.dim, ffn, spec.mlp_bias, stack)


def _head(spec: ModelSpec) -> Entries:
    yield from _norm("norm", spec)
    if not spec.tied:
        yield "output.weight", (spec.vocab_size, spec.dim)


def _norm(name: str, spec: ModelSpec) -> Entries:
    yield f"{name}.weight", (spec.dim,)
    if spec.norm_bias:
        yield f"{name}.bias", (spec.dim,)


def _linear(name: str, out: int, into: int, bias: bool, stack: tuple[int, ...] = ()) -> Entries:
    yield f"{name}.weight", (*stack, out, into)
    if bias:
        yield f"{name}.bias", (*stack, out)
