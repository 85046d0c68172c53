"""A `config.json` for a model of ours: of the first family whose config says all that the model is."""

from pathlib import Path
from typing import Any

from fivefold.interchange.names import FAMILIES, links
from fivefold.models.huggingface import Config, described
from fivefold.models.own.spec import OwnSpec
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput, Problem

TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CHECKED = Path("config.json")


def config_of(spec: ModelSpec, kept: Config | None = None) -> Config:
    """What `config.json` says of a model. Raises `BadInput` where no family has such a model.

    kept  the config that the model came with, if any: used as it is while it describes the model, else for
          what it says beside it
    """
    if kept is not None and _says(kept, spec):
        return {key: value for key, value in kept.items() if key != "auto_map"}
    tried = [] if kept is None else [str(kept.get("model_type"))]
    for family in dict.fromkeys([*(name for name in tried if name in FAMILIES), *FAMILIES]):
        config = _written(spec, family)
        if _says(config, spec):
            beside = {key: kept[key] for key in _BESIDE if kept is not None and key in kept}
            return config | beside
    raise BadInput([_no_family(spec)])


_BESIDE = ("bos_token_id", "eos_token_id", "pad_token_id")


def same_model(first: ModelSpec, second: ModelSpec) -> bool:
    """Whether two specs are one model, whatever they are called."""
    return first.model_dump(exclude={"name"}) == second.model_dump(exclude={"name"})


def _says(config: Config, spec: ModelSpec) -> bool:
    """Whether a config describes this very model, and its family has a name for every weight."""
    try:
        links(spec, str(config.get("model_type")))
        return same_model(described(config, CHECKED), spec)
    except (BadInput, KeyError):
        return False


def _no_family(spec: ModelSpec) -> Problem:
    special: dict[str, Any] = {"parallel_block": spec.parallel_block, "shared_experts": spec.shared_experts}
    special |= {"norm": spec.norm, "positions": spec.positions, "activation": spec.activation}
    special |= {"qkv_bias": spec.qkv_bias, "attention_out_bias": spec.attention_out_bias}
    special |= {"mlp_bias": spec.mlp_bias, "qk_norm": spec.qk_norm, "sliding_window": spec.sliding_window}
    special |= {"norm_after": spec.norm_after, "norm_unit_offset": spec.norm_unit_offset}
    special |= {"attention_softcap": spec.attention_softcap, "final_softcap": spec.final_softcap}
    what = ", ".join(f"{key} = {value}" for key, value in special.items() if value)
    named = "a model of your own" if isinstance(spec, OwnSpec) else f"a model with {what}"
    return Problem("model", f"no family of transformers is {named}", f"Known here: {', '.join(FAMILIES)}.")


def _written(spec: ModelSpec, family: str) -> Config:
    """A config of a family, with what it can say of a model."""
    row = FAMILIES[family]
    common = {
        "architectures": [row.architecture],
        "model_type": family,
        "vocab_size": spec.vocab_size,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }
    return common | (_gpt2(spec) if family == "gpt2" else _llama_like(spec) | _OWN.get(family, _llama)(spec))


def _llama_like(spec: ModelSpec) -> Config:
    scaling: Config | None = None
    if spec.rope_scaling is not None:
        scaling = spec.rope_scaling.model_dump()
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
        scaling["rope_type"] = "llama3"
    return {
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "attention_dropout": 0.0,
    }


def _llama(spec: ModelSpec) -> Config:
    return {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def _mistral(spec: ModelSpec) -> Config:
    return {"sliding_window": spec.sliding_window}


def _mixtral(spec: ModelSpec) -> Config:
    experts = {"num_local_experts": spec.experts, "num_experts_per_tok": spec.experts_per_token}
    return {"sliding_window": spec.sliding_window, "output_router_logits": False} | experts


def _qwen(spec: ModelSpec) -> Config:
    window = spec.sliding_window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": spec.layers if window is None else 0,
    }


def _qwen3(spec: ModelSpec) -> Config:
    return _qwen(spec) | {"attention_bias": spec.qkv_bias}


def _gemma2(spec: ModelSpec) -> Config:
    kinds = ["full_attention" if spec.window(n) is None else "sliding_attention" for n in range(spec.layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": spec.qkv_bias,
        "sliding_window": spec.sliding_window,
        "layer_types": kinds,
        "query_pre_attn_scalar": spec.attention_scale_dim or spec.head_dim,
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.final_softcap,
    }


_OWN: dict[str, Any] = {
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
}


def _gpt2(spec: ModelSpec) -> Config:
    activations = {"gelu-tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
    return {
        "n_embd": spec.dim,
        "n_inner": spec.ffn,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_positions": spec.max_seq_len,
        "activation_function": activations.get(spec.activation, spec.activation),
        "layer_norm_epsilon": spec.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
