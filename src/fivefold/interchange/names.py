"""Which tensor of a Hugging Face file is which of ours: one row for each family.

A family's row gives, for each part of a block, the name that its files have for it. Where the two differ by
more than a name, a `Link` says how: a part of a fused tensor, a matrix stored [in, out], one expert's matrix
of those we keep stacked.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fivefold.models.inventory import Parameter, parameters
from fivefold.models.spec import ModelSpec

OUTPUT = "lm_head.weight"
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Endings of what older files carry beside the weights: tables that a model makes itself."""


class Fused(NamedTuple):
    """The `place`-th of so many equal `parts` of a tensor, along its last dimension."""

    name: str
    place: int
    parts: int


@dataclass(frozen=True)
class Family:
    """How the files of a family name things.

    architecture  the class in `transformers`
    blocks        what stands before the number of a layer
    outside       our name of a module outside of blocks -> theirs
    parts         our name of a module of a block -> theirs; `{expert}` stands for the number of an expert
    transposed    the matrices of a block are stored [in, out]
    prefix        of everything but the output matrix; files that lack it are read too
    """

    architecture: str
    blocks: str
    outside: Mapping[str, str]
    parts: Mapping[str, str | Fused] = field(default_factory=dict)
    transposed: bool = False
    prefix: str = ""


_LLAMA = Family(
    "LlamaForCausalLM",
    blocks="model.layers",
    outside={
        "embedding.tokens": "model.embed_tokens",
        "head.norm": "model.norm",
        "head.output": "lm_head",
    },
    parts={
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
_HEAD_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.{expert}.w1",
    "mlp.experts.down": "block_sparse_moe.experts.{expert}.w2",
    "mlp.experts.up": "block_sparse_moe.experts.{expert}.w3",
}
_GEMMA2 = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_GPT2 = Family(
    "GPT2LMHeadModel",
    blocks="transformer.h",
    outside={
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "head.norm": "transformer.ln_f",
        "head.output": "lm_head",
    },
    parts={
        "attention_norm": "ln_1",
        "attention.query": Fused("attn.c_attn", 0, 3),
        "attention.key": Fused("attn.c_attn", 1, 3),
        "attention.value": Fused("attn.c_attn", 2, 3),
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    transposed=True,
    prefix="transformer.",
)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, architecture="MistralForCausalLM"),
    "qwen2": replace(_LLAMA, architecture="Qwen2ForCausalLM"),
    "qwen3": replace(_LLAMA, architecture="Qwen3ForCausalLM", parts={**_LLAMA.parts, **_HEAD_NORMS}),
    "mixtral": replace(_LLAMA, architecture="MixtralForCausalLM", parts={**_LLAMA.parts, **_MIXTRAL}),
    "gemma2": replace(_LLAMA, architecture="Gemma2ForCausalLM", parts={**_LLAMA.parts, **_GEMMA2}),
    "gpt2": _GPT2,
}
"""By the `model_type` of a config.json."""


@dataclass(frozen=True)
class Link:
    """`ours`, or what it has of one expert, is the `place`-th of so many `parts` of `theirs`.

    shape  of theirs, whole
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]
    expert: int | None = None
    place: int = 0
    parts: int = 1
    transposed: bool = False


def links(spec: ModelSpec, family: str) -> list[Link]:
    """Every tensor of the files of a model, in our order. Raises `KeyError` for a part without a name."""
    row = FAMILIES[family]
    return [link for parameter in parameters(spec) for link in _links_of(parameter, row)]


def their_shapes(found: list[Link]) -> dict[str, tuple[int, ...]]:
    """The tensors that the files of a model hold."""
    return {link.theirs: link.shape for link in found}


def _links_of(parameter: Parameter, row: Family) -> Iterator[Link]:
    module, _, kind = parameter.name.rpartition(".")
    inside = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    if inside is None:
        yield Link(parameter.name, f"{row.outside[module]}.{kind}", parameter.shape)
        return
    layer, part = inside.groups()
    theirs = row.parts[part]
    fused = theirs if isinstance(theirs, Fused) else Fused(theirs, 0, 1)
    stacked = "{expert}" in fused.name
    shape = parameter.shape[1:] if stacked else parameter.shape
    transposed = row.transposed and len(shape) == 2
    shape = shape[::-1] if transposed else shape
    shape = (*shape[:-1], shape[-1] * fused.parts)
    for expert in range(parameter.shape[0]) if stacked else [None]:
        name = fused.name.format(expert=expert)
        full = f"{row.blocks}.{layer}.{name}.{kind}"
        yield Link(parameter.name, full, shape, expert, fused.place, fused.parts, transposed)
