"""Tiny random models of `transformers`, one or two of each family, saved as it saves them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from fivefold.storage.safetensors import laid_out, read_header, write
from tests.models.test_hf_parity import LLAMA3_ROPE, SIZES

hub: Any = transformers  # its types are not for such small models
BASE: dict[str, Any] = SIZES | {"vocab_size": 300, "num_hidden_layers": 4, "initializer_range": 0.1}
GPT2: dict[str, Any] = {"vocab_size": 300, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
GEMMA2: dict[str, Any] = {
    "head_dim": 12,
    "sliding_window": 7,
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
    "pad_token_id": None,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ENDS = {"bos_token_id": None, "eos_token_id": 256}


def configs() -> dict[str, Any]:
    """Fresh ones: saving a model writes into its config."""
    return {
        "llama": hub.LlamaConfig(**BASE, **ENDS, head_dim=24, rope_parameters=LLAMA3_ROPE),
        "llama-biased": hub.LlamaConfig(
            **BASE, **ENDS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        "mistral": hub.MistralConfig(**BASE, **ENDS, sliding_window=7),
        "qwen2": hub.Qwen2Config(**BASE, **ENDS),
        "qwen3": hub.Qwen3Config(**BASE, **ENDS, head_dim=16, tie_word_embeddings=True),
        "gpt2": hub.GPT2Config(**GPT2, **ENDS, **NO_DROPOUT, initializer_range=0.1),
        "gpt2-untied": hub.GPT2Config(**GPT2, **ENDS, n_inner=50, tie_word_embeddings=False),
        "gemma2": hub.Gemma2Config(**BASE, **ENDS, **GEMMA2),
        "mixtral": hub.MixtralConfig(**BASE, **ENDS, num_local_experts=4, num_experts_per_tok=2),
    }


FAMILIES = tuple(configs())


@cache
def model(name: str) -> Any:
    """With every weight moved from its initial 0 or 1."""
    torch.manual_seed(0)
    made = hub.AutoModelForCausalLM.from_config(configs()[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return made


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    hub.utils.logging.disable_progress_bar()
    other = hub.AutoModelForCausalLM.from_config(configs()[name], dtype=dtype)
    other.load_state_dict(model(name).state_dict())
    other.save_pretrained(folder, **options)
    return folder


def opened(folder: Path) -> Any:
    """What `transformers` makes of a folder."""
    found, told = hub.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    if found.config.model_type == "mixtral":
        found.set_experts_implementation("eager")  # the other way knows no float64
    return found.eval()


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder: dtype, shape and bytes."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        for name, stored in read_header(path).items():
            data = content[stored.offset : stored.offset + stored.bytes]
            found[name] = (stored.dtype, stored.shape, data)
    return found


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The folder's one file with other tensors in it."""
    held: dict[str, Any] = dict(tensors(folder))
    change(held)
    beginning, _ = laid_out({name: (dtype, shape) for name, (dtype, shape, _) in held.items()})
    write(folder / "model.safetensors", beginning, (memoryview(data) for _, _, data in held.values()))
