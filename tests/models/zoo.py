"""Small models of every kind, for tests."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from fivefold.models.decoder import Decoder
from fivefold.models.initial import initialise
from fivefold.models.spec import ModelSpec, RopeScaling

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "dim": 24,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 40,
    "max_seq_len": 64,
    "init_std": 0.3,
}

GEMMA: dict[str, Any] = {
    "norm_unit_offset": True,
    "norm_after": True,
    "scale_embedding": True,
    "activation": "geglu-tanh",
    "tied": True,
    "sliding_window": 5,
    "full_attention_every": 2,
    "attention_scale_dim": 5,
    "attention_softcap": 1.5,
    "final_softcap": 3.0,
}


def small(**fields: Any) -> ModelSpec:
    return ModelSpec(**{**SMALL, **fields})


def built(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A filled `Decoder` (typed Any: tests reach into parts that may be None).

    Norm weights and biases, which start at 1 and 0, are moved so that they matter.
    """
    with torch.device("meta"):
        model = Decoder(spec).to(dtype)
    model.to_empty(device="cpu")
    initialise(model, spec, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


@st.composite
def small_specs(draw: st.DrawFn, experts: bool = False) -> ModelSpec:
    """Any valid spec of a few thousand parameters."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    positions = draw(st.sampled_from(["rope", "learned"]))
    norm = draw(st.sampled_from(["rmsnorm", "layernorm"]))
    fields: dict[str, Any] = {
        "vocab_size": draw(st.integers(2, 40)),
        "dim": draw(st.integers(1, 20)),
        "layers": draw(st.integers(1, 3)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": draw(st.integers(1, 20)),
        "activation": draw(st.sampled_from(["swiglu", "geglu-tanh", "gelu", "gelu-tanh", "relu"])),
        "norm": norm,
        "norm_bias": draw(st.booleans()) if norm == "layernorm" else False,
        "positions": positions,
        "max_seq_len": draw(st.integers(8, 16)),
        "sliding_window": draw(st.none() | st.integers(1, 9)),
        "attention_scale_dim": draw(st.none() | st.integers(1, 9)),
        "attention_softcap": draw(st.none() | st.just(2.0)),
        "final_softcap": draw(st.none() | st.just(3.0)),
        "norm_unit_offset": norm == "rmsnorm" and draw(st.booleans()),
    }
    flags = ("qkv_bias", "attention_out_bias", "mlp_bias", "tied", "qk_norm", "parallel_block")
    for flag in (*flags, "norm_after", "scale_embedding"):
        fields[flag] = draw(st.booleans())
    if fields["sliding_window"] is not None:
        fields["full_attention_every"] = draw(st.none() | st.integers(2, 3))
    if positions == "rope" and draw(st.booleans()):
        fields["rope_scaling"] = RopeScaling(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position=8
        )
    if experts and draw(st.booleans()):
        fields["experts"] = draw(st.integers(2, 4))
        fields["experts_per_token"] = draw(st.integers(1, 2))
    return ModelSpec(**fields)
