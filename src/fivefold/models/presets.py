"""Models known by name, each with the source of its shape."""

from typing import Any

from fivefold.models.spec import ModelSpec, RopeScaling

_GPT: dict[str, Any] = {
    "activation": "gelu-tanh",
    "norm": "layernorm",
    "positions": "learned",
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
    "tied": True,
}
_LLAMA_2: dict[str, Any] = {"vocab_size": 32_000, "max_seq_len": 4096}
_LLAMA_3: dict[str, Any] = {"vocab_size": 128_256, "rope_theta": 500_000.0}
_GEMMA_2: dict[str, Any] = {
    "vocab_size": 256_000,
    "max_seq_len": 8192,
    "activation": "geglu-tanh",
    "norm_eps": 1e-6,
    "norm_unit_offset": True,
    "norm_after": True,
    "tied": True,
    "scale_embedding": True,
    "sliding_window": 4096,
    "full_attention_every": 2,
    "attention_softcap": 50.0,
    "final_softcap": 30.0,
}


def _llama_3_long(factor: float) -> dict[str, Any]:
    return {**_LLAMA_3, "rope_scaling": RopeScaling(factor=factor), "max_seq_len": 131_072}


_SPECS = [
    # Ours: small enough for a laptop; layers, heads, kv heads, ffn and vocabulary all split by 2 and by 4.
    # 320 holds the byte tokenizer's 257 symbols.
    ModelSpec(name="tiny", vocab_size=320, dim=128, layers=8, heads=8, kv_heads=4, ffn=256, max_seq_len=1024),
    # The same with 8 experts. A token uses 2, together as wide as tiny's feed-forward layer.
    ModelSpec(
        name="tiny-moe",
        vocab_size=320,
        dim=128,
        layers=8,
        heads=8,
        kv_heads=4,
        ffn=128,
        experts=8,
        experts_per_token=2,
        max_seq_len=1024,
    ),
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and the released config.json
    # files.
    ModelSpec(
        name="gpt2", vocab_size=50_257, dim=768, layers=12, heads=12, ffn=3072, max_seq_len=1024, **_GPT
    ),
    ModelSpec(
        name="gpt2-xl", vocab_size=50_257, dim=1600, layers=48, heads=25, ffn=6400, max_seq_len=1024, **_GPT
    ),
    # Brown et al. 2020, arXiv:2005.14165, table 2.1. Its alternating sparse attention layers are dense here.
    ModelSpec(
        name="gpt3-175b",
        vocab_size=50_257,
        dim=12_288,
        layers=96,
        heads=96,
        ffn=49_152,
        max_seq_len=2048,
        **_GPT,
    ),
    # Touvron et al. 2023, arXiv:2307.09288, and the released config.json files.
    ModelSpec(name="llama2-7b", dim=4096, layers=32, heads=32, ffn=11_008, **_LLAMA_2),
    ModelSpec(name="llama2-70b", dim=8192, layers=80, heads=64, kv_heads=8, ffn=28_672, **_LLAMA_2),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3, and the released config.json files: 8B and 70B as
    # released with a context of 8,192 (Llama 3), 405B with 131,072 (Llama 3.1).
    ModelSpec(
        name="llama3-8b", dim=4096, layers=32, heads=32, kv_heads=8, ffn=14_336, max_seq_len=8192, **_LLAMA_3
    ),
    ModelSpec(
        name="llama3-70b", dim=8192, layers=80, heads=64, kv_heads=8, ffn=28_672, max_seq_len=8192, **_LLAMA_3
    ),
    ModelSpec(
        name="llama3-405b", dim=16_384, layers=126, heads=128, kv_heads=8, ffn=53_248, **_llama_3_long(8.0)
    ),
    # The released config.json files of Llama 3.2.
    ModelSpec(
        name="llama3.2-1b",
        dim=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        ffn=8192,
        tied=True,
        **_llama_3_long(32.0),
    ),
    ModelSpec(
        name="llama3.2-3b",
        dim=3072,
        layers=28,
        heads=24,
        kv_heads=8,
        ffn=8192,
        tied=True,
        **_llama_3_long(32.0),
    ),
    # Smith et al. 2022, arXiv:2201.11990, section 3.1; GPT-2's vocabulary, padded to a multiple of 1,024.
    ModelSpec(
        name="mt-nlg-530b",
        vocab_size=51_200,
        dim=20_480,
        layers=105,
        heads=128,
        ffn=81_920,
        max_seq_len=2048,
        **_GPT,
    ),
    # Narayanan et al. 2021, arXiv:2104.04473, table 1, the last row; the vocabulary is that of section 5.1.
    ModelSpec(
        name="megatron-1t",
        vocab_size=51_200,
        dim=25_600,
        layers=128,
        heads=160,
        ffn=102_400,
        max_seq_len=2048,
        **_GPT,
    ),
    # Chowdhery et al. 2022, arXiv:2204.02311, section 2 and table 1.
    ModelSpec(
        name="palm-540b",
        vocab_size=256_000,
        dim=18_432,
        layers=118,
        heads=48,
        kv_heads=1,
        head_dim=256,
        ffn=73_728,
        norm="layernorm",
        norm_bias=False,
        parallel_block=True,
        tied=True,
        max_seq_len=2048,
    ),
    # Gemma team 2024, arXiv:2408.00118, table 1, and the released config.json files.
    ModelSpec(
        name="gemma2-9b",
        dim=3584,
        layers=42,
        heads=16,
        kv_heads=8,
        head_dim=256,
        ffn=14_336,
        attention_scale_dim=256,
        **_GEMMA_2,
    ),
    ModelSpec(
        name="gemma2-27b",
        dim=4608,
        layers=46,
        heads=32,
        kv_heads=16,
        head_dim=128,
        ffn=36_864,
        attention_scale_dim=144,
        **_GEMMA_2,
    ),
    # Jiang et al. 2024, arXiv:2401.04088, table 1, and the released config.json.
    ModelSpec(
        name="mixtral-8x7b",
        vocab_size=32_000,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        ffn=14_336,
        experts=8,
        experts_per_token=2,
        rope_theta=1e6,
        max_seq_len=32_768,
    ),
    # An estimate, never confirmed: Patel and Wong 2023, "GPT-4 Architecture, Infrastructure, Training
    # Dataset, Costs, Vision, MoE" (SemiAnalysis), reports 1.8T parameters in 120 layers, 16 experts of about
    # 111B of which a token uses 2, and about 55B of attention. Width and heads are chosen to give those sums.
    ModelSpec(
        name="gpt4-estimate",
        vocab_size=100_352,
        dim=10_752,
        layers=120,
        heads=84,
        ffn=43_008,
        activation="gelu",
        norm="layernorm",
        experts=16,
        experts_per_token=2,
        max_seq_len=8192,
    ),
]

PRESETS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}
