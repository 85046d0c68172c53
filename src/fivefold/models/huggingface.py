"""Reads a Hugging Face `config.json` as a `ModelSpec`.

What a file leaves out takes the default that `transformers` gives its family, and what this decoder cannot
compute is refused, so that a spec that is returned is the same model. Dropout is the exception: it
belongs to a training recipe, and models here are trained without; `unheeded` names it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivefold.models.spec import DEFAULT_ROPE_THETA, ModelSpec
from fivefold.problems import BadInput, Problem

Config = dict[str, Any]

# Our field -> their key. These must be present; the rest have defaults.
_LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
_GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "max_seq_len": "n_positions",
}
_OTHER_KEYS = {
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "n_inner",
    "norm_eps": "rms_norm_eps or layer_norm_epsilon",
    "tied": "tie_word_embeddings",
    "init_std": "initializer_range",
    "sliding_window": "sliding_window",
    "attention_scale_dim": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
    "qkv_bias": "attention_bias",
    "attention_out_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling or rope_parameters",
}

_GPT2_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_RANDOM = (*_GPT2_DROPOUTS, "attention_dropout", "hidden_dropout", "router_jitter_noise")
"""What makes training random. `transformers` gives GPT-2's a default of 0.1."""


def read_config(path: str | Path, key: str = "model.hf") -> ModelSpec:
    """The model that a `config.json`, or the folder it lies in, describes. Raises `BadInput`.

    key  what the user gave the path as, for messages
    """
    return described(load_config(path, key), _file(path))


def model_type(path: str | Path, key: str = "model.hf") -> str:
    """The family that a `config.json` names. Raises `BadInput`."""
    return _family(load_config(path, key), _file(path))


def described(config: Config, file: Path) -> ModelSpec:
    """The model that the contents of a `config.json` describe; `file` is for messages. Raises `BadInput`."""
    family = _family(config, file)
    sizes, read = _FAMILIES[family]
    missing = [key for key in sizes.values() if config.get(key) is None]
    if missing:
        hint = f"A {family} config has {', '.join(sizes.values())}."
        raise BadInput([Problem(f"{file}: {key}", "is missing", hint) for key in missing])
    try:
        fields = {field: config[key] for field, key in sizes.items()} | read(config)
    except _ConfigError as refusal:
        raise BadInput([Problem(f"{file}: {refusal.key}", refusal.message, refusal.hint)]) from None
    return _validated(file, {"name": _name(config, family)} | fields, sizes)


def unheeded(path: str | Path) -> list[str]:
    """What a `config.json` asks of training that is not done here: a sentence for each. Raises `BadInput`."""
    config = load_config(path)
    asked = dict.fromkeys(_GPT2_DROPOUTS, 0.1) if config.get("model_type") == "gpt2" else {}
    asked |= {key: config[key] for key in _RANDOM if config.get(key) is not None}
    return [
        f"{_file(path)}: {key} = {value}, but models are trained without it here; it is taken as 0."
        for key, value in asked.items()
        if value != 0
    ]


def _file(path: str | Path) -> Path:
    file = Path(path).expanduser()
    return file / "config.json" if file.is_dir() else file


def _family(config: Config, file: Path) -> str:
    family = str(config.get("model_type", "(missing)"))
    if family not in _FAMILIES:
        hint = f"Known here: {', '.join(_FAMILIES)}. Or describe the model by its fields under [model]."
        raise BadInput([Problem(f"{file}: model_type", f"'{family}' is not known", hint)])
    return family


class _ConfigError(Exception):
    """A setting that is missing, or that this decoder has no counterpart for."""

    def __init__(self, key: str, message: str, hint: str):
        self.key, self.message, self.hint = key, message, hint
        super().__init__(message)


def _unsupported(key: str, value: object, hint: str) -> _ConfigError:
    return _ConfigError(key, f"{value!r} is not supported", hint)


def load_config(path: str | Path, key: str = "model.hf") -> Config:
    """The contents of a `config.json`, or of that of a folder. Raises `BadInput`."""
    try:
        file = _file(path)
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "Give the path of a config.json, or of the folder it lies in."
        raise BadInput([Problem(key, f"no such file: {file}", hint)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput([Problem(key, f"cannot read {path}: {error}")]) from None
    except json.JSONDecodeError as error:
        message = f"is not JSON: {error.msg}"
        raise BadInput([Problem(f"{file}:{error.lineno}", message, "Download the file again.")]) from None
    except RecursionError:
        raise BadInput([Problem(str(file), "is nested too deeply", "Download the file again.")]) from None
    if not isinstance(config, dict):
        raise BadInput(
            [Problem(str(file), f"holds a JSON {type(config).__name__}", "It must hold an object.")]
        )
    return config


def _name(config: Config, family: str) -> str:
    """What the file calls the model: the hub's name, else its architecture, else its family."""
    stated, kinds = config.get("_name_or_path"), config.get("architectures")
    found = Path(stated).name if isinstance(stated, str) else ""
    return found or (str(kinds[0]) if isinstance(kinds, list) and kinds else family)


def _validated(file: Path, fields: Config, sizes: dict[str, str]) -> ModelSpec:
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError as invalid:
        keys = _OTHER_KEYS | sizes
        problems = []
        for error in invalid.errors():
            where = [keys.get(str(part), str(part)) for part in error["loc"]]
            given = "" if not where else f" (given: {error['input']!r})"
            message = error["msg"].removeprefix("Value error, ") + given
            problems.append(Problem(": ".join([str(file), ".".join(where)]) if where else str(file), message))
        raise BadInput(problems) from None


def _llama_like(config: Config) -> Config:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _unsupported("hidden_act", activation, "The gated feed-forward layer here uses silu.")
    return _rotary_decoder(config)


def _rotary_decoder(config: Config) -> Config:
    """What Llama and its relatives have in common, whatever their feed-forward layer is."""
    fields = {
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied": config.get("tie_word_embeddings", False),
        "init_std": config.get("initializer_range", 0.02),
    }
    return fields | _rope(config)


def _llama(config: Config) -> Config:
    bias = config.get("attention_bias", False)
    return _llama_like(config) | {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": config.get("mlp_bias", False),
        "sliding_window": _window(config, None),
    }


def _mistral(config: Config) -> Config:
    return _llama_like(_with_stated_kv_heads(config)) | {
        "sliding_window": _window(config, config.get("sliding_window", 4096))
    }


def _mixtral(config: Config) -> Config:
    defaults: Config = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
    return _llama_like(defaults | _with_stated_kv_heads(config)) | {
        "experts": config.get("num_local_experts", 8),
        "experts_per_token": config.get("num_experts_per_tok", 2),
        "sliding_window": _window(config, config.get("sliding_window")),
    }


def _qwen2(config: Config) -> Config:
    return _llama_like(_with_stated_kv_heads(config)) | {
        "qkv_bias": True,
        "sliding_window": _qwen_window(config),
    }


def _qwen3(config: Config) -> Config:
    bias = config.get("attention_bias", False)
    return _llama_like({"head_dim": 128} | _with_stated_kv_heads(config)) | {
        "qk_norm": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": _qwen_window(config),
    }


def _gemma2(config: Config) -> Config:
    defaults: Config = {"head_dim": 256, "tie_word_embeddings": True}
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise _unsupported("hidden_activation", activation, "Only gelu_pytorch_tanh is supported.")
    if config.get("use_bidirectional_attention"):
        raise _unsupported("use_bidirectional_attention", True, "Only causal attention is supported.")
    bias = config.get("attention_bias", False)
    window, every = _alternating_window(config)
    return _rotary_decoder(defaults | _with_stated_kv_heads(config)) | {
        "activation": "geglu-tanh",
        "norm_unit_offset": True,
        "norm_after": True,
        "scale_embedding": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": window,
        "full_attention_every": every,
        "attention_scale_dim": config.get("query_pre_attn_scalar", 256),
        "attention_softcap": config.get("attn_logit_softcapping", 50.0),
        "final_softcap": config.get("final_logit_softcapping", 30.0),
    }


def _alternating_window(config: Config) -> tuple[Any, int | None]:
    """The window, and every which layer has none: as `layer_types` says, by default every second."""
    window, layers = config.get("sliding_window", 4096), config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        return window, None if window is None else 2
    if isinstance(kinds, list) and len(kinds) == layers:
        if all(kind == "full_attention" for kind in kinds):
            return None, None
        first = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers + 1
        pattern = ["sliding_attention" if (n + 1) % first else "full_attention" for n in range(layers)]
        if kinds == pattern and window is not None:
            return window, first if first <= layers else None
    hint = "Supported: sliding_attention with full_attention in every n-th layer, in no layer, or in all."
    raise _unsupported("layer_types", kinds, hint)


def _with_stated_kv_heads(config: Config) -> Config:
    """Outside the Llama family, `transformers` fills in a fixed number that rarely fits: better refused."""
    if "num_key_value_heads" not in config:
        raise _ConfigError("num_key_value_heads", "is missing", "State it; null means as many as heads.")
    return config


def _rope(config: Config) -> Config:
    """Rotary settings, in the old form (rope_theta, rope_scaling) or the new one (rope_parameters)."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise _unsupported(key, rope, "One set of rotary settings for all layers is supported.")
    for place in (config, rope):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise _unsupported(
                "partial_rotary_factor", place["partial_rotary_factor"], "Only 1.0 is supported."
            )
    theta = rope.get("rope_theta", config.get("rope_theta", DEFAULT_ROPE_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise _unsupported(f"{key}.rope_type", kind, "Supported: default, llama3.")
    wanted = ("factor", "low_freq_factor", "high_freq_factor")
    for name in wanted:
        if name not in rope:
            raise _ConfigError(
                f"{key}.{name}", "is missing", f"The llama3 rope type has {', '.join(wanted)}."
            )
    length = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    length = config.get("original_max_position_embeddings", length)
    scaling = {name: rope[name] for name in wanted} | {"original_max_position": length}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _qwen_window(config: Config) -> Any:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    kinds = config.get("layer_types")
    if window is None or kinds is not None:
        all_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
        return None if all_full else _window(config, window)
    first, layers = config.get("max_window_layers", 28), config["num_hidden_layers"]
    if first == 0:
        return window
    if not isinstance(first, int) or not isinstance(layers, int) or first < layers:
        hint = f"A window in every layer (0) or in none ({layers} or more) is supported."
        raise _unsupported("max_window_layers", first, hint)
    return None


def _window(config: Config, window: Any) -> Any:
    """`window`, once `layer_types`, where given, is seen to say the same of every layer."""
    kinds = config.get("layer_types")
    expected = "full_attention" if window is None else "sliding_attention"
    if kinds is None or (isinstance(kinds, list) and all(kind == expected for kind in kinds)):
        return window
    hint = f"With sliding_window = {window}, only {expected} in every layer is supported."
    raise _unsupported("layer_types", kinds, hint)


def _gpt2(config: Config) -> Config:
    activations = {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu", "relu": "relu"}
    activation = str(config.get("activation_function", "gelu_new"))
    if activation not in activations:
        raise _unsupported("activation_function", activation, f"Supported: {', '.join(activations)}.")
    for key, only in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(key, only) != only:
            raise _unsupported(key, config[key], f"Only {str(only).lower()} is supported.")
    dim, inner = config["n_embd"], config.get("n_inner")
    if inner is None:
        inner = 4 * dim if isinstance(dim, int) else dim
    return {
        "ffn": inner,
        "activation": activations[activation],
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tied": config.get("tie_word_embeddings", True),
        "init_std": config.get("initializer_range", 0.02),
    }


_FAMILIES: dict[str, tuple[dict[str, str], Callable[[Config], Config]]] = {
    "llama": (_LLAMA_SIZES, _llama),
    "mistral": (_LLAMA_SIZES, _mistral),
    "mixtral": (_LLAMA_SIZES, _mixtral),
    "qwen2": (_LLAMA_SIZES, _qwen2),
    "qwen3": (_LLAMA_SIZES, _qwen3),
    "gemma2": (_LLAMA_SIZES, _gemma2),
    "gpt2": (_GPT2_SIZES, _gpt2),
}
