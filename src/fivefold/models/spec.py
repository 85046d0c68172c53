"""`ModelSpec`: everything that makes one decoder-only transformer differ from another."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

DEFAULT_ROPE_THETA = 10_000.0
GATED = ("swiglu", "geglu-tanh")
"""Activations with a gate matrix."""
QUERY_TILE = 256
"""Queries at a time in attention with a soft cap: see `capped`."""


class RopeScaling(BaseModel):
    """Llama 3.1's stretching of rotary positions beyond the length first trained on.

    Wavelengths above `original_max_position / low_freq_factor` are divided by `factor`, those below
    `original_max_position / high_freq_factor` stay as they are, and those between are blended.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(description="how many times longer")
    low_freq_factor: PositiveFloat = Field(
        default=1.0, description="rotations below which a dimension is stretched"
    )
    high_freq_factor: PositiveFloat = Field(
        default=4.0, description="rotations above which a dimension is kept"
    )
    original_max_position: Positive = Field(default=8192, description="sequence length before stretching")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor} must be above "
                f"low_freq_factor = {self.low_freq_factor}"
            )
        return self


class ModelSpec(BaseModel):
    """A decoder-only transformer.

    `kv_heads`, `head_dim` and `norm_bias` follow from the other fields when left out. They then hold the
    derived value, but stay out of `model_dump(exclude_unset=True)`, so that they follow later overrides too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(default="custom", description="what reports call this model")
    vocab_size: Positive = Field(description="rows of the token embedding")
    dim: Positive = Field(description="width of the residual stream")
    layers: Positive = Field(description="number of blocks")
    heads: Positive = Field(description="query heads")
    kv_heads: Positive = Field(default=0, description="key and value heads (default: as many as heads)")
    head_dim: Positive = Field(default=0, description="width of one head (default: dim / heads)")
    ffn: Positive = Field(description="hidden width of the feed-forward layer (of one expert)")
    activation: Literal["swiglu", "geglu-tanh", "gelu", "gelu-tanh", "relu"] = Field(
        default="swiglu",
        description="swiglu and geglu-tanh have a gate matrix; gelu is exact, gelu-tanh its approximation",
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(default="rmsnorm", description="kind of normalisation")
    norm_eps: PositiveFloat = Field(default=1e-5, description="added to the variance in every norm")
    norm_bias: bool = Field(default=True, description="layer norms have a bias (default: true for layernorm)")
    norm_unit_offset: bool = Field(
        default=False, description="RMS norms multiply by 1 + weight, and weights start at 0 (Gemma)"
    )
    norm_after: bool = Field(
        default=False,
        description="attention and feed-forward are normed again before they join the stream (Gemma 2)",
    )
    positions: Literal["rope", "learned"] = Field(default="rope", description="rotary, or a learned table")
    rope_theta: PositiveFloat = Field(
        default=DEFAULT_ROPE_THETA, description="base of the rotary wavelengths"
    )
    rope_scaling: RopeScaling | None = Field(
        default=None, description="Llama 3.1 stretching of rotary positions"
    )
    max_seq_len: Positive = Field(description="longest sequence; with learned positions, rows of their table")
    qkv_bias: bool = Field(default=False, description="biases on query, key and value projections")
    attention_out_bias: bool = Field(default=False, description="bias on the attention output projection")
    mlp_bias: bool = Field(default=False, description="biases in the feed-forward layer")
    tied: bool = Field(default=False, description="the output projection is the token embedding")
    scale_embedding: bool = Field(
        default=False, description="token embeddings are multiplied by the square root of dim (Gemma)"
    )
    qk_norm: bool = Field(default=False, description="RMS norm over each query and key head (Qwen3)")
    parallel_block: bool = Field(
        default=False,
        description="attention and feed-forward read one shared norm and are added together (PaLM)",
    )
    sliding_window: Positive | None = Field(
        default=None, description="a token attends to this many latest tokens, itself included (Mistral)"
    )
    full_attention_every: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="of this many layers the last has no sliding window (Gemma 2: 2)"
    )
    attention_scale_dim: Positive | None = Field(
        default=None, description="scores are divided by the square root of this (default: head_dim)"
    )
    attention_softcap: PositiveFloat | None = Field(
        default=None, description="scores of attention become cap * tanh(score / cap) (Gemma 2: 50)"
    )
    final_softcap: PositiveFloat | None = Field(
        default=None, description="logits become cap * tanh(logit / cap) (Gemma 2: 30)"
    )
    experts: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="feed-forward experts in each block"
    )
    experts_per_token: Positive | None = Field(default=None, description="experts that each token is sent to")
    shared_experts: Annotated[int, Field(ge=0)] = Field(
        default=0, description="experts beside those that every token passes through"
    )
    init_std: PositiveFloat = Field(default=0.02, description="standard deviation of initial weights")

    @model_validator(mode="before")
    @classmethod
    def _none_means_left_out(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            return {k: v for k, v in fields.items() if v is not None or k not in cls.model_fields}
        return fields

    @model_validator(mode="after")
    def _complete(self) -> Self:
        given = self.model_fields_set
        problems = []
        if "head_dim" not in given and self.dim % self.heads:
            problems.append(
                f"dim = {self.dim} is not a multiple of heads = {self.heads}; "
                "change one of them, or set head_dim"
            )
        # Written past pydantic, so that derived values do not count as given.
        for key, derived in (
            ("kv_heads", self.heads),
            ("head_dim", max(1, self.dim // self.heads)),
            ("norm_bias", self.norm == "layernorm"),
        ):
            if key not in given:
                self.__dict__[key] = derived
        problems += self._contradictions()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> list[str]:
        problems = []
        if self.heads % self.kv_heads:
            choices = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            problems.append(
                f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}; "
                f"choose kv_heads from {choices}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            problems.append(
                f"head_dim = {self.head_dim} is odd, and rotary positions turn pairs; make it even"
            )
        if self.positions == "learned" and self.rope_scaling is not None:
            problems.append('rope_scaling needs positions = "rope", not "learned"; leave it out')
        if self.positions == "learned" and self.rope_theta != DEFAULT_ROPE_THETA:
            problems.append('rope_theta needs positions = "rope", not "learned"; leave it out')
        if self.norm == "rmsnorm" and self.norm_bias:
            problems.append('norm_bias = true needs norm = "layernorm"; RMS norms have no bias')
        if self.norm == "layernorm" and self.norm_unit_offset:
            problems.append('norm_unit_offset = true needs norm = "rmsnorm"; leave it out')
        if self.full_attention_every is not None and self.sliding_window is None:
            problems.append(
                f"full_attention_every = {self.full_attention_every} needs a window for the other layers; "
                "set sliding_window, or leave it out"
            )
        if (self.experts is None) != (self.experts_per_token is None):
            problems.append("experts and experts_per_token go together; give both or neither")
        elif (self.experts_per_token or 0) > (self.experts or 0):
            problems.append(
                f"experts_per_token = {self.experts_per_token} is more than experts = {self.experts}; "
                f"choose 1 to {self.experts}"
            )
        if self.shared_experts and self.experts is None:
            problems.append(
                f"shared_experts = {self.shared_experts} needs experts to stand beside; "
                "set experts and experts_per_token, or leave it out"
            )
        return problems

    @property
    def looks_up(self) -> bool:
        """Whether the embedding is a lookup, whose backward needs no weights."""
        return True

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate matrix beside the up and down ones."""
        return self.activation in GATED

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by, so that dividing scores by sqrt(head_dim) scales them as asked."""
        scale_dim = self.attention_scale_dim
        return 1.0 if scale_dim is None else math.sqrt(self.head_dim / scale_dim)

    def window(self, layer: int) -> int | None:
        """How many latest tokens a token of this layer attends to, itself included; None: all."""
        every = self.full_attention_every
        return None if every is not None and (layer + 1) % every == 0 else self.sliding_window
