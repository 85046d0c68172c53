"""Hugging Face weights under our names.

A second map of names beside `interchange/names.py`, on purpose: it shares nothing with that, so a tensor
that is taken for another there does not compute the same here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fivefold.models.inventory import parameters
from fivefold.models.spec import ModelSpec
from fivefold.problems import Problem, refuse

_LLAMA_PARTS = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
}
# Mixtral's files have a matrix for each expert, under these names; `transformers` stacks them when it loads.
_MIXTRAL_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
_LLAMA_OUTSIDE = {
    "embedding.tokens": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.output": "lm_head",
}
_GPT2_PARTS = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT2_OUTSIDE = {
    "embedding.tokens": "wte",
    "embedding.positions": "wpe",
    "head.norm": "ln_f",
    "head.output": "lm_head",
}
# Constants that older files carry beside the weights.
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def from_hf_state_dict(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a Llama, Mistral, Mixtral, Qwen2, Qwen3 or GPT-2 model, as `Decoder(spec)` names them.

    Shaped as there, too, and views of the given tensors wherever possible. Raises `BadInput` if any weight is
    missing, left over or of another shape: nothing is loaded by half.
    """
    weights = {name: tensor for name, tensor in state.items() if not name.endswith(_NOT_WEIGHTS)}
    gpt2 = any(name.endswith("wte.weight") for name in weights)
    ours = dict(_from_gpt2(weights) if gpt2 else _from_llama(weights))
    if spec.tied:
        ours.pop("head.output.weight", None)
    expected = {parameter.name: parameter.shape for parameter in parameters(spec)}
    problems = [Problem(name, "is missing from the weights") for name in expected if name not in ours]
    problems += [
        Problem(name, "is in the weights, but not in this model") for name in ours if name not in expected
    ]
    problems += [
        Problem(name, f"has shape {tuple(ours[name].shape)} in the weights, {shape} in this model")
        for name, shape in expected.items()
        if name in ours and tuple(ours[name].shape) != shape
    ]
    refuse(problems)
    return {name: ours[name] for name in expected}


def _from_llama(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    one_by_one: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        stacked = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name)
        single = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(w[123])\.weight", name)
        if stacked is not None:
            layer, kind = stacked.groups()
            parts = ("gate", "up") if kind == "gate_up" else ("down",)
            for part, matrices in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
                yield f"blocks.{layer}.mlp.experts.{part}.weight", matrices
        elif single is not None:
            layer, number, kind = single.groups()
            part = f"blocks.{layer}.mlp.experts.{_MIXTRAL_PARTS[kind]}.weight"
            one_by_one.setdefault(part, {})[int(number)] = tensor
        else:
            yield _renamed(name, "model.layers.", _LLAMA_PARTS, _LLAMA_OUTSIDE), tensor
    for part, experts in one_by_one.items():
        yield part, torch.stack([experts[number] for number in sorted(experts)])


def _from_gpt2(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """GPT-2 stores its matrices [in, out], and query, key and value as one."""
    for name, tensor in weights.items():
        name = name.removeprefix("transformer.")
        if name.startswith("h.") and ".ln_" not in name and tensor.dim() == 2:
            tensor = tensor.T
        block, fused, kind = name.partition(".attn.c_attn.")
        if not fused:
            yield _renamed(name, "h.", _GPT2_PARTS, _GPT2_OUTSIDE), tensor
            continue
        thirds = torch.tensor_split(tensor, 3)
        for part, third in zip(("query", "key", "value"), thirds, strict=True):
            yield f"blocks.{block.removeprefix('h.')}.attention.{part}.{kind}", third


def _renamed(name: str, blocks: str, parts: dict[str, str], outside: dict[str, str]) -> str:
    """Our name of a weight; one that has none keeps its own, and is refused later by it."""
    theirs, _, kind = name.rpartition(".")
    prefix = ""
    if name.startswith(blocks):
        layer, _, theirs = theirs.removeprefix(blocks).partition(".")
        prefix, outside = f"blocks.{layer}.", parts
    found = [ours for ours, other in outside.items() if other == theirs]
    return f"{prefix}{found[0]}.{kind}" if found else name
