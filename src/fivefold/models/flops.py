"""Floating-point operations per token, by a named convention.

A matrix multiplication by a weight costs 2 operations per weight and token; attention costs 4 per head
dimension for every key a query is compared with. The backward pass costs twice the forward. The output
projection counts, the embedding lookup does not; of experts, those a token uses, the shared ones and the
router count. Norms, activations and the optimizer do not count.

Convention "causal" counts the keys a query may see: half the sequence on average. "full" counts
the whole sequence, as the PaLM and Megatron formulas do, though causal kernels skip half of it.

What a user's own model multiplies is not known: every parameter of its blocks and head counts 2 a
token, and nothing else does. With backward that is the well-known 6 a parameter and token.
"""

import re
from dataclasses import dataclass
from typing import Literal

from fivefold.models.inventory import parameters
from fivefold.models.own.spec import OwnSpec
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput, Problem


@dataclass(frozen=True)
class FlopsPerToken:
    """Forward operations of one token, in three parts; the totals of a training step follow.

    blocks     multiplications by the blocks' weights
    attention  queries with keys, and weights with values, over all blocks
    head       multiplication by the output projection
    """

    blocks: float
    attention: float
    head: float

    @property
    def forward(self) -> float:
        return self.blocks + self.attention + self.head

    @property
    def model(self) -> float:
        """Forward and backward: what MFU counts."""
        return 3 * self.forward

    def hardware(self, recompute: str) -> float:
        """`model` and what recomputation repeats: what HFU counts.

        recompute  none; full, every-C or sqrt (the blocks' forward once more); selective (nothing that
                   counts: it keeps the results of multiplications and attention)
        """
        if recompute in ("none", "selective"):
            return self.model
        if recompute in ("full", "sqrt") or re.fullmatch(r"every-[1-9]\d*", recompute):
            return self.model + self.blocks + self.attention
        hint = "Allowed: none, full, sqrt, selective, or every-C with C a number of layers (every-2)."
        raise BadInput([Problem("training.recompute", f"'{recompute}' is not known", hint)])


def flops_per_token(
    spec: ModelSpec, seq_len: int, attention: Literal["causal", "full"] = "causal"
) -> FlopsPerToken:
    """Forward operations of one token in a sequence of `seq_len` tokens, one document."""
    if isinstance(spec, OwnSpec):
        blocks, head = (
            sum(2.0 * parameter.count for parameter in parameters(spec) if parameter.part.startswith(part))
            for part in ("blocks.", "head")
        )
        return FlopsPerToken(blocks=blocks, attention=0.0, head=head)
    query_dim, kv_dim = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention_weights = 2 * spec.dim * (query_dim + kv_dim)
    mlp_weights = (3 if spec.gated else 2) * spec.dim * spec.ffn
    if spec.experts is not None and spec.experts_per_token is not None:
        mlp_weights = mlp_weights * (spec.experts_per_token + spec.shared_experts) + spec.dim * spec.experts
    return FlopsPerToken(
        blocks=2.0 * spec.layers * (attention_weights + mlp_weights),
        attention=4.0 * spec.layers * query_dim * keys_seen(spec, seq_len, attention),
        head=2.0 * spec.dim * spec.vocab_size,
    )


def keys_seen(spec: ModelSpec, seq_len: int, attention: Literal["causal", "full"] = "causal") -> float:
    """Keys a query is compared with, on average over queries and layers.

    A window of W fills up over the first W tokens.
    """
    windows = [min(seq_len, spec.window(layer) or seq_len) for layer in range(spec.layers)]
    seen = [w if attention == "full" else w - w**2 / (2 * seq_len) for w in windows]
    return sum(seen) / spec.layers
