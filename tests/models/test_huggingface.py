import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.models.huggingface import read_config
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
MISTRAL = LLAMA | {"model_type": "mistral"}
MIXTRAL = LLAMA | {"model_type": "mixtral"}
QWEN2 = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3"}
GEMMA2 = LLAMA | {"model_type": "gemma2"}
SLIDING, FULL = "sliding_attention", "full_attention"
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 128,
}
WINDOW = QWEN2 | {"use_sliding_window": True, "sliding_window": 16}

# As published, less what does not describe the model.
RELEASED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "gemma2-27b": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608,
        "initializer_range": 0.02,
        "intermediate_size": 36864,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "vocab_size": 50257,
    },
    "llama2-70b": {
        "hidden_act": "silu",
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "intermediate_size": 28672,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "llama3.2-1b": {
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
}


def read(folder: Path, config: object) -> ModelSpec:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_config(folder)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_our_preset(name: str, tmp_path: Path):
    assert read(tmp_path, RELEASED[name] | {"_name_or_path": f"someone/{name}"}) == PRESETS[name]


def test_a_file_or_its_folder(tmp_path: Path):
    spec = read(tmp_path, LLAMA)
    assert spec == read_config(tmp_path / "config.json") == read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"_name_or_path": "meta-llama/Llama-3.1-8B", "architectures": ["X"]}, "Llama-3.1-8B"),
        ({"_name_or_path": "", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": []}, "llama"),
        ({}, "llama"),
    ],
)
def test_a_model_is_called_what_its_config_says(said: dict[str, Any], name: str, tmp_path: Path):
    assert read(tmp_path, LLAMA | said).name == name


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, {"rope_theta": 10_000.0, "norm_eps": 1e-6, "tied": False, "head_dim": 8, "kv_heads": 2}),
        (LLAMA | {"num_key_value_heads": None}, {"kv_heads": 8}),
        (LLAMA | {"head_dim": 32}, {"head_dim": 32}),
        (LLAMA | {"attention_bias": True}, {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": False}),
        (LLAMA | {"sliding_window": 8}, {"sliding_window": None}),
        (LLAMA | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, {"rope_theta": 7.0}),
        (MISTRAL, {"sliding_window": 4096, "qkv_bias": False}),
        (MISTRAL | {"sliding_window": None}, {"sliding_window": None}),
        (MIXTRAL, {"experts": 8, "experts_per_token": 2, "rope_theta": 1e6, "norm_eps": 1e-5}),
        (MIXTRAL | {"num_local_experts": 6, "sliding_window": 16}, {"experts": 6, "sliding_window": 16}),
        (QWEN2, {"qkv_bias": True, "attention_out_bias": False, "sliding_window": None, "qk_norm": False}),
        (QWEN2 | {"sliding_window": 16}, {"sliding_window": None}),
        (WINDOW | {"max_window_layers": 0}, {"sliding_window": 16}),
        (WINDOW | {"max_window_layers": 4}, {"sliding_window": None}),
        (WINDOW, {"sliding_window": None}),
        (WINDOW | {"layer_types": ["sliding_attention"] * 4}, {"sliding_window": 16}),
        (WINDOW | {"layer_types": ["full_attention"] * 4}, {"sliding_window": None}),
        (QWEN3, {"qk_norm": True, "head_dim": 128, "qkv_bias": False}),
        (GEMMA2, {"head_dim": 256, "tied": True, "attention_scale_dim": 256, "attention_softcap": 50.0}),
        (GEMMA2, {"final_softcap": 30.0, "sliding_window": 4096, "full_attention_every": 2}),
        (GEMMA2 | {"layer_types": [SLIDING, FULL] * 2}, {"sliding_window": 4096, "full_attention_every": 2}),
        (GEMMA2 | {"layer_types": [SLIDING] * 3 + [FULL]}, {"full_attention_every": 4}),
        (GEMMA2 | {"layer_types": [SLIDING] * 4}, {"sliding_window": 4096, "full_attention_every": None}),
        (GEMMA2 | {"layer_types": [FULL] * 4}, {"sliding_window": None, "full_attention_every": None}),
        (GEMMA2 | {"sliding_window": None}, {"sliding_window": None, "full_attention_every": None}),
        (GEMMA2 | {"attn_logit_softcapping": None}, {"attention_softcap": None, "final_softcap": 30.0}),
        (
            GPT2,
            {"ffn": 256, "tied": True, "activation": "gelu-tanh", "positions": "learned", "norm_bias": True},
        ),
        (GPT2 | {"n_inner": 100, "activation_function": "relu"}, {"ffn": 100, "activation": "relu"}),
    ],
)
def test_what_is_left_out_takes_the_familys_default(
    config: dict[str, Any], expected: dict[str, Any], tmp_path: Path
):
    spec = read(tmp_path, config)
    assert {name: getattr(spec, name) for name in expected} == expected


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", ["config.json:1", "is not JSON"]),
        ("[1]", ["holds a JSON list", "object"]),
        (
            {"model_type": "bert"},
            ["model_type", "'bert' is not known", "llama, mistral, mixtral, qwen2, qwen3, gemma2, gpt2"],
        ),
        ({}, ["model_type", "missing", "llama, mistral"]),
        (without(LLAMA, "hidden_size", "vocab_size"), ["hidden_size: is missing", "vocab_size: is missing"]),
        (without(GPT2, "n_layer"), ["n_layer: is missing"]),
        (without(QWEN3, "num_key_value_heads"), ["num_key_value_heads: is missing"]),
        (LLAMA | {"hidden_act": "gelu"}, ["hidden_act", "'gelu' is not supported", "silu"]),
        (GPT2 | {"activation_function": "mish"}, ["activation_function", "'mish'", "gelu_new"]),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling.rope_type", "'linear'"]),
        (
            LLAMA | {"rope_parameters": {"rope_type": "yarn"}},
            ["rope_parameters.rope_type", "'yarn'", "llama3"],
        ),
        (LLAMA | {"rope_scaling": LLAMA3}, ["rope_scaling.high_freq_factor: is missing"]),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["for all layers"]),
        (LLAMA | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5 is not supported"]),
        (WINDOW | {"max_window_layers": 2}, ["max_window_layers", "2 is not supported"]),
        (WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 4}, ["layer_types"]),
        (MISTRAL | {"layer_types": ["full_attention"] * 4}, ["layer_types"]),
        (LLAMA | {"layer_types": ["chunked_attention"] * 4}, ["layer_types"]),
        (GEMMA2 | {"layer_types": [FULL, SLIDING] * 2}, ["layer_types", "every n-th layer"]),
        (GEMMA2 | {"layer_types": [SLIDING, FULL]}, ["layer_types"]),
        (GEMMA2 | {"hidden_activation": "gelu"}, ["hidden_activation", "'gelu' is not supported"]),
        (GEMMA2 | {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (GEMMA2 | {"final_logit_softcapping": 0.0}, ["final_logit_softcapping", "greater than 0"]),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        (LLAMA | {"hidden_size": "64"}, ["hidden_size", "valid integer", "'64'"]),
        (LLAMA | {"num_hidden_layers": -1}, ["num_hidden_layers", "greater than or equal to 1", "-1"]),
        (LLAMA | {"num_key_value_heads": 3}, ["kv_heads = 3 does not divide heads = 8"]),
        (LLAMA | {"rope_scaling": LLAMA3 | {"high_freq_factor": "x"}}, ["rope_scaling", "high_freq_factor"]),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(config: object, said: list[str], tmp_path: Path):
    with pytest.raises(BadInput) as caught:
        read(tmp_path, config)
    for words in said:
        assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(BadInput, match=r"model\.hf: no such file: .*config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=r"model\.hf: cannot read"):
        read_config(tmp_path)


OTHER_KEYS = {
    *(
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    ),
    *("layer_types", "max_window_layers", "head_dim", "n_inner", "hidden_act", "activation_function"),
    *("rms_norm_eps", "tie_word_embeddings", "attention_bias", "_name_or_path", "model_type"),
}
KEYS = sorted({*LLAMA, *GPT2, *WINDOW, *OTHER_KEYS})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.floats()
    | st.sampled_from(["", "x", "llama3", "64"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["factor", "rope_type"]), inner)
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([LLAMA, MISTRAL, WINDOW, QWEN3, GPT2]), st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_file_is_read_or_refused(tmp_path_factory, config, changes):
    folder = tmp_path_factory.getbasetemp()
    with contextlib.suppress(BadInput):
        assert isinstance(read(folder, config | changes), ModelSpec)
