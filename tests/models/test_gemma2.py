"""Gemma 2: our decoder against the one in `transformers`, and the attention that its soft cap needs."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from fivefold.models import capped
from fivefold.models.capped import capped_attention
from fivefold.models.decoder import Decoder
from fivefold.models.huggingface import read_config
from fivefold.models.inventory import parameter_count
from fivefold.models.norm import offset_rms_norm
from tests.models.zoo import GEMMA, built, small

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,  # whose embedding they do not train
    "query_pre_attn_scalar": 7,
    "sliding_window": 7,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
}
CONFIGS = {
    "alternating": transformers.Gemma2Config(**SIZES),
    "every third": transformers.Gemma2Config(
        **SIZES,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "sliding")],
    ),
    "no caps": transformers.Gemma2Config(
        **SIZES | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
    ),
}
NAMES = {
    "embedding.tokens": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_out_norm": "post_feedforward_layernorm",
    "head.norm": "model.norm",
}


def their_name(ours: str) -> str:
    layer, _, kind = ours.rpartition(".")
    if not layer.startswith("blocks."):
        return f"{NAMES[layer]}.{kind}"
    _, number, part = layer.split(".", 2)
    return f"model.layers.{number}.{NAMES[part]}.{kind}"


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their norms and softmax go through float32 whatever the model's dtype is."""
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: x.softmax(dim))
    monkeypatch.setattr(Gemma2RMSNorm, "forward", lambda norm, x: norm._norm(x) * (1 + norm.weight))


def models(config: Any, folder: Path, dtype: torch.dtype = torch.float64) -> tuple[Any, Decoder]:
    """A random model of theirs, every norm moved from its initial 0, and ours with the same weights."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    theirs.to(dtype).eval()
    theirs.model.embed_tokens.embed_scale = torch.tensor(math.sqrt(config.hidden_size), dtype=dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.config.save_pretrained(folder)
    with torch.device("meta"):
        ours = Decoder(read_config(folder)).to(dtype)
    ours.to_empty(device="cpu")
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.pop(their_name(name)))
    assert not weights
    return theirs, ours


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_gradients_are_theirs(name: str, exact: None, tmp_path: Path) -> None:
    theirs, ours = models(CONFIGS[name], tmp_path)
    assert parameter_count(ours.spec) == sum(parameter.numel() for parameter in theirs.parameters())

    tokens, targets = torch.randint(0, 97, (2, 2, 40))
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-10)
    assert expected.std() > 0.1

    ours(tokens, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        wanted = gradients[their_name(name)]
        scale = wanted.abs().max()
        assert scale > 1e-6
        torch.testing.assert_close(parameter.grad / scale, wanted / scale, rtol=0, atol=1e-10)


def test_every_part_changes_the_numbers(exact: None, tmp_path: Path) -> None:
    """None of the settings is without effect in the comparison above."""
    _, ours = models(CONFIGS["alternating"], tmp_path)
    tokens = torch.randint(0, 97, (1, 40))
    expected, state = ours(tokens), ours.state_dict()
    for change in (
        {"attention_softcap": None},
        {"final_softcap": None},
        {"attention_scale_dim": None},
        {"full_attention_every": None},
        {"full_attention_every": 3},
        {"sliding_window": 8},
        {"scale_embedding": False},
        {"norm_unit_offset": False},
        {"activation": "swiglu"},
    ):
        other = Decoder(ours.spec.model_copy(update=change)).double()
        other.load_state_dict(state)
        assert (other(tokens) - expected).abs().max() > 1e-3, change


def test_narrow_numbers_are_rounded_as_theirs(tmp_path: Path) -> None:
    theirs, ours = models(CONFIGS["alternating"], tmp_path, torch.bfloat16)
    tokens = torch.arange(97)[None]
    assert ours.embedding is not None
    assert torch.equal(ours.embedding(tokens, tokens), theirs.model.embed_tokens(tokens))
    norm, x = theirs.model.norm, torch.randn(64, 32, dtype=torch.bfloat16)
    assert torch.equal(offset_rms_norm(x, norm.weight, norm.eps), norm(x))


# --- attention with a soft cap -----------------------------------------------------------------------------


def plainly(visible: Tensor, cap: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return (cap * (scores / cap).tanh()).masked_fill(~visible, -math.inf).softmax(-1) @ value


@given(
    rows=st.integers(1, 2),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    length=st.integers(1, 20),
    tile=st.integers(1, 21),
    window=st.none() | st.integers(1, 22),
    apart=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tiles_of_capped_attention_make_the_whole(
    rows: int, groups: int, repeats: int, length: int, tile: int, window: int | None, apart: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    heads = (groups * repeats, groups, groups)
    tensors = [torch.randn(rows, length, n, 4, dtype=torch.float64).transpose(1, 2) for n in heads]
    index = torch.arange(length)
    visible = (index <= index[:, None]) & (index > index[:, None] - (window or length))
    starts = None
    if apart:
        begins = torch.rand(rows, length) < 0.3
        starts = torch.where(begins, index, 0).cummax(1).values
        visible = visible & (index >= starts[:, None, :, None])
    grad = torch.randn_like(tensors[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capped, "QUERY_TILE", tile)
        found = differentiated(lambda *x: capped_attention(*x, starts, window, 0.7)[0], tensors, grad)
    expected = differentiated(partial(plainly, visible, 0.7), tensors, grad)
    for ours, true in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-13)


def differentiated(function: Any, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The result and the gradient of each argument."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    result = function(*leaves)
    return [result, *torch.autograd.grad(result, leaves, grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_capped_attention_is_near(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, n, 33, 8, dtype=dtype) for n in (4, 2, 2)]
    grad = torch.randn_like(tensors[0])
    visible = torch.ones(33, 33, dtype=torch.bool).tril()
    found = differentiated(lambda *x: capped_attention(*x, None, None, 2.0)[0], tensors, grad)
    wide = [x.double() for x in tensors]
    expected = differentiated(partial(plainly, visible, 2.0), wide, grad.double())
    for ours, true in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), true, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_capped_models_compile() -> None:
    model = built(small(**GEMMA), dtype=torch.float32)
    tokens = torch.randint(0, 61, (2, 12))
    expected = model(tokens)
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(tokens), expected)
    model(tokens, tokens).backward()
