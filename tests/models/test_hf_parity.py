"""Our decoder against the one in `transformers`: the same config.json and weights, in float64."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fivefold.models.decoder import Decoder
from fivefold.models.huggingface import read_config
from fivefold.models.inventory import parameter_count
from fivefold.problems import BadInput
from tests.models.hf_weights import from_hf_state_dict

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, head_dim=24, rope_parameters=LLAMA3_ROPE),
    "llama-biased": transformers.LlamaConfig(
        **SIZES, head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=7),
    "mixtral": transformers.MixtralConfig(
        **SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    ),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2-window": transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=0
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3
    ),
    "gpt2-other": transformers.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_inner=50,
        n_positions=40,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
}


def hugging_face_model(config: Any) -> Any:
    """A random model, with every weight moved from its initial 0 or 1.

    Its own RMS norms and router go through float32 whatever the model's dtype is, so others take their place.
    """
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    own = (LlamaRMSNorm, MistralRMSNorm, MixtralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
    for name, module in list(model.named_modules()):
        if isinstance(module, own):
            norm = nn.RMSNorm(module.weight.shape, module.variance_epsilon, dtype=torch.float64)
            model.set_submodule(name, norm)
        if isinstance(module, MixtralTopKRouter):
            module.forward = partial(exact_router, module)  # type: ignore[method-assign]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def exact_router(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As MixtralTopKRouter.forward: logits, the weights of the chosen experts, their numbers."""
    logits = nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)
    best = logits.softmax(-1).topk(router.top_k)
    return logits, best.values / best.values.sum(-1, keepdim=True), best.indices


def ours_from(folder: Path, state: dict[str, Tensor]) -> Decoder:
    spec = read_config(folder)
    with torch.device("meta"):
        model = Decoder(spec).double()
    model.to_empty(device="cpu")
    model.load_state_dict(from_hf_state_dict(spec, state), strict=not spec.tied and spec.experts is None)
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_loss_and_gradients_are_theirs(family: str, tmp_path: Path):
    theirs = hugging_face_model(CONFIGS[family])
    theirs.config.save_pretrained(tmp_path)
    ours = ours_from(tmp_path, theirs.state_dict())
    assert parameter_count(ours.spec) == sum(parameter.numel() for parameter in theirs.parameters())

    tokens = torch.randint(0, 97, (2, 40))
    expected = theirs(tokens).logits
    got = ours(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)

    targets = torch.randint(0, 97, (2, 40))
    targets[0, :5] = -100
    ours(tokens, targets).backward()
    nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    gradients = from_hf_state_dict(
        ours.spec, {name: parameter.grad for name, parameter in theirs.named_parameters()}
    )
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        # Some are zero but for rounding: without rotary positions a key's bias cancels in the softmax.
        scale = torch.maximum(gradients[name].abs().max(), 1e-3 * largest)
        torch.testing.assert_close(parameter.grad / scale, gradients[name] / scale, rtol=0, atol=1e-10)


def test_the_old_and_the_new_way_to_write_rotary_settings_are_one(tmp_path: Path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    new = read_config(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "rope_parameters" in text
    config = json.loads(text)
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == new
    rope["type"] = rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == new
    assert new.rope_scaling is not None


def test_older_gpt2_files_without_a_prefix_and_with_mask_constants_load(tmp_path: Path):
    theirs = hugging_face_model(CONFIGS["gpt2"])
    theirs.config.save_pretrained(tmp_path)
    state = theirs.state_dict()
    older = {
        name.removeprefix("transformer."): value for name, value in state.items() if "lm_head" not in name
    }
    older["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    older["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tokens = torch.randint(0, 97, (1, 9))
    torch.testing.assert_close(ours_from(tmp_path, older)(tokens), ours_from(tmp_path, state)(tokens))


def test_weights_that_do_not_fit_are_all_named(tmp_path: Path):
    theirs = hugging_face_model(CONFIGS["qwen2"])
    theirs.config.save_pretrained(tmp_path)
    spec, state = read_config(tmp_path), dict(theirs.state_dict())
    del state["model.layers.1.self_attn.k_proj.bias"]
    state["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
    state["model.norm.weight"] = torch.zeros(5)
    with pytest.raises(BadInput) as caught:
        from_hf_state_dict(spec, state)
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [
        ("blocks.1.attention.key.bias", "is missing from the weights"),
        ("model.layers.0.mlp.extra.weight", "is in the weights, but not in this model"),
        ("head.norm.weight", "has shape (5,) in the weights, (32,) in this model"),
    ]


def test_mixtral_files_hold_experts_one_by_one(tmp_path: Path):
    theirs = hugging_face_model(CONFIGS["mixtral"])
    theirs.config.save_pretrained(tmp_path)
    state = dict(theirs.state_dict())
    single: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        layer, _, part = name.partition("experts.")
        if part == "down_proj":
            single |= {f"{layer}experts.{n}.w2.weight": matrix for n, matrix in enumerate(tensor)}
        elif part == "gate_up_proj":
            for n, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                single |= {f"{layer}experts.{n}.w1.weight": gate, f"{layer}experts.{n}.w3.weight": up}
        else:
            single[name] = tensor
    tokens = torch.randint(0, 97, (1, 9))
    torch.testing.assert_close(ours_from(tmp_path, single)(tokens), ours_from(tmp_path, state)(tokens))
    del single["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    with pytest.raises(BadInput, match=r"blocks\.1\.mlp\.experts\.down\.weight: has shape \(4, 32, 56\)"):
        ours_from(tmp_path, single)
