"""Memory of software stacks: a description of each kind, and its fitted constants.

Every stack (`profiles.py`) names the description that fits it. Our own needs none: its figures come from our
ledger. The others are described by the bytes that their programs keep for each weight, each token and each
logit. What no description gives is fitted on published runs: at most two constants for a description on a
device, in `memory_constants.json`, by `fivefold backtest --fit`.

Bytes of a block's activations, for each token and each unit of width (a 16-bit tensor has 2):

    stream  what is as wide as the model: inputs and outputs of norms (8), dropout's masks (1 each)
    query   what is as wide as the query heads: queries (2), what attention returns (2), copies of either
    kv      what is as wide as the key heads: keys (2), values (2), copies of them
    ffn     what is as wide as the feed-forward layer, in and out of its activation function; `gated` where it
            has a gate beside (6 where gate, activation and product are one kernel, 8 where they are two)
    scores  for each attention score: softmax (2), dropout's mask (1) and output (2); 0 where they are never
            written down (flash attention), or under selective recomputation

Of the logits: bytes for each while the loss is computed. 16-bit logits, their float32 copy and the softmax
are 2 + 4 + 4 = 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fivefold.planner.fitted import MEMORY_CONSTANTS


@dataclass(frozen=True)
class MemoryConstants:
    """What is fitted, or taken as typical.

    activations  factor on activations and what comes and goes with them
    base         GiB that a rank's allocator holds beside what is described: workspaces, flat buffers
    gathered     share of the gathered inputs of tensor-parallel layers that are kept for backward
    slack        what the allocator reserves beyond what is allocated, as a part of it
    spread       standard deviation of the logarithm of measured over predicted
    """

    activations: float = 1.0
    base: float = 0.5
    gathered: float = 0.0
    slack: float = 0.05
    spread: float = 0.1


@dataclass(frozen=True)
class MemoryProfile:
    """One version of a training program. Bytes are for each weight, or as the module says.

    weights, states   compute weights; master weights and moments
    gradients         by the training dtype: those that add up over micro-batches
    fresh             gradients as backward makes them, all there at its end
    buckets           copies for messages, where there are several data ranks
    unsharded_states  states where nothing is sharded, if there are more then
    working           share of a block's activations that its backward needs on top
    streams           tensors as wide as the model and not split by tp that come and go (tp > 1)
    checkpoint_split  under full recomputation the kept inputs are split over tp
    selective         what selective recomputation leaves: 1 where it drops only the scores
    needs             fewest micro-batches, less pp
    fits              which constants are fitted, at most two
    measures          what its published figure is: of which rank, and which of our figures
    """

    name: str
    weights: float = 2.0
    states: float = 12.0
    gradients: Mapping[str, float] = field(default_factory=lambda: {"bfloat16": 4.0, "float16": 4.0})
    fresh: float = 0.0
    buckets: float = 0.0
    unsharded_states: float = 12.0
    stream: float = 8.0
    query: float = 4.0
    kv: float = 4.0
    ffn: float = 4.0
    gated: float = 6.0
    scores: float = 0.0
    logits: float = 10.0
    working: float = 0.5
    streams: float = 2.0
    checkpoint_split: bool = True
    selective: float = 1.0
    needs: int | None = None
    fits: tuple[str, ...] = ()
    rank: Literal["first", "worst"] = "worst"
    figure: Literal["allocated", "reserved", "device"] = "allocated"


_GPT: dict[str, Any] = {"stream": 10.0, "scores": 5.0}
"""Megatron's GPT layer with dropout: 10 + 24 / tp for each token and width, as Korthikanti et al. count."""

_HALF = {"bfloat16": 2.0, "float16": 2.0}

_PROFILES = (
    # nanotron at the Ultrascale Playbook's revision, as its source reads. Float32 gradients of every weight,
    # and backward's own until it ends; DDP keeps buckets as large as the weights. Queries,
    # keys and values stay in one tensor while keys and values are copied for the rotation, attention's output
    # is copied for its projection, and silu and its product with the other half are two operations. Column-
    # parallel layers gather their input again in backward; the runs without a pipeline are of two revisions,
    # of which one kept it: hence `gathered`. The figure is torch's, of the first rank.
    MemoryProfile(
        "nanotron",
        fresh=2.0,
        buckets=2.0,
        query=6.0,
        kv=8.0,
        gated=8.0,
        working=0.0,
        streams=4.0,
        needs=-1,
        fits=("base", "gathered"),
        rank="first",
    ),
    # DeepSpeed's ZeRO 1 in fp16: gradients of 16 bits, and for the shard a rank updates float32 weights, two
    # moments and float32 gradients. Its bf16 optimizer has float32 gradients of every weight beside them.
    # Inputs of recomputed layers are whole on every tp rank. The figure is what the driver shows.
    MemoryProfile(
        "megatron-deepspeed",
        **_GPT,
        states=16.0,
        unsharded_states=20.0,
        gradients={"float16": 2.0, "bfloat16": 6.0},
        working=1.0,
        checkpoint_split=False,
        fits=("base", "activations"),
        figure="device",
    ),
    MemoryProfile("megatron", **_GPT),
    MemoryProfile("megatron-core"),
    # Megatron-core with its fused cross entropy: 16-bit logits and one float32 copy. Both what is allocated
    # and what is reserved are published.
    MemoryProfile("simumax", logits=6.0, fits=("activations", "slack")),
    # Megatron without flash attention and without recomputation.
    MemoryProfile("zero-bubble", **_GPT),
    # Gradients add up in 16 bits; the optimizer has float32 copies of its shard of them.
    MemoryProfile("internevo", gradients=_HALF, states=16.0, unsharded_states=16.0, figure="device"),
    # NVIDIA's performance recipes reduce, and keep, gradients in 16 bits (grad_reduce_in_fp32 = False).
    MemoryProfile("nemo", gradients=_HALF, logits=6.0),
    # Fused cross entropy.
    MemoryProfile("llm-foundry", logits=6.0),
    # FSDP2: float32 weights, gradients and moments are sharded. Of selective recomputation every second
    # product is kept. The loop holds on to the 16-bit logits while backward has the softmax, its gradient and
    # that in 16 bits: 2 + 4 + 4 + 2.
    MemoryProfile("torchtitan", selective=0.5, logits=12.0, fits=("activations",), figure="reserved"),
)


MEMORY_PROFILES = {profile.name: profile for profile in _PROFILES}
"""By name."""

LEDGER = "ledger"
"""In place of a profile's name: our own program, whose tensors the ledger counts."""


def memory_constants(device: str, profile: str) -> MemoryConstants:
    """The constants of a profile on a device; where it was never fitted there, those of another device.

    Memory hardly depends on the device. Our own tensors are counted, and need no base.
    """
    if profile == LEDGER:
        return MemoryConstants(base=0.0)
    fitted, spread = (MEMORY_CONSTANTS.table(table).get(profile, {}) for table in ("constants", "spread"))
    where = device if device in fitted else next(iter(fitted), None)
    return MemoryConstants() if where is None else MemoryConstants(**fitted[where], spread=spread[where])
