"""Other software stacks, as `stacks.toml` describes them: how they run, and what they keep in memory.

What no description gives is fitted on published runs, by `fivefold backtest --fit`.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fivefold.backtest.cuts import CUTS
from fivefold.planner.memory.fullest_rank import MemoryConstants
from fivefold.planner.time.constants import FittedFile
from fivefold.planner.time.stack import OURS, Stack
from fivefold.problems import BadInput, Problem, did_you_mean

MEMORY_CONSTANTS = FittedFile(Path(__file__).parent / "memory_constants.json")


def descriptions(kind: str) -> dict[str, dict[str, Any]]:
    """The tables of one kind ("stack", "memory"), by name."""
    text = (Path(__file__).parent / "stacks.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = tomllib.loads(text)[kind]
    return tables


@cache
def stacks() -> dict[str, Stack]:
    """Every stack by its name; "-fp8" or "-fp4" after it: with matrix products in those."""
    plain = [OURS]
    for name, row in descriptions("stack").items():
        plain.append(Stack(name, cut=CUTS[row.pop("cut", "evenly")], **row))
    fp8 = [replace(stack, name=f"{stack.name}-fp8", dtype="float8") for stack in plain]
    fp4 = [replace(stack, name=f"{stack.name}-fp4", dtype="float4") for stack in plain]
    return {stack.name: stack for stack in plain + fp8 + fp4}


def stack_named(name: str) -> Stack:
    """The stack of that name. Raises `BadInput`."""
    if name not in stacks():
        raise BadInput([Problem("stack", f"there is no stack '{name}'", did_you_mean(name, stacks()))])
    return stacks()[name]


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes that a kind of stack keeps for each weight, each token and each logit."""

    name: str
    # For each weight.
    weights: float = 2.0  # that computes
    states: float = 12.0  # master weights and moments
    unsharded_states: float = 12.0  # the same where nothing is sharded, if there are more then
    # Gradients that add up over micro-batches, by the training dtype.
    gradients: Mapping[str, float] = field(default_factory=lambda: {"bfloat16": 4.0, "float16": 4.0})
    fresh: float = 0.0  # gradients as backward makes them, all there at its end
    buckets: float = 0.0  # copies for messages, where there are several data ranks
    # Of a block's activations, for each token and each unit of width (a 16-bit tensor has 2).
    stream: float = 8.0  # as wide as the model: inputs and outputs of norms (8), dropout's masks (1 each)
    query: float = 4.0  # as wide as the query heads: queries (2), what attention returns (2), copies
    kv: float = 4.0  # as wide as the key heads: keys (2), values (2), copies of them
    ffn: float = 4.0  # as wide as the feed-forward layer, in and out of its activation function
    gated: float = 6.0  # likewise with a gate beside; 8 where activation and product are two kernels
    # For each attention score: softmax (2), dropout's mask (1) and output (2); 0 where they are never written
    # down (flash attention), or under selective recomputation.
    scores: float = 0.0
    logits: float = 10.0  # each while the loss is computed: in 16 bits, as float32 and as softmax, 2 + 4 + 4
    working: float = 0.5  # share of a block's activations that its backward needs on top
    streams: float = 2.0  # tensors as wide as the model, not split by tp, that come and go (tp > 1)
    checkpoint_split: bool = True  # under full recomputation the kept inputs are split over tp
    selective: float = 1.0  # what selective recomputation leaves: 1 where it drops only the scores
    needs: int | None = None  # fewest micro-batches, less pp
    fits: Sequence[str] = ()  # which of `MemoryConstants` are fitted, at most two
    # What its published figure is: of which rank, and which of our figures.
    rank: Literal["first", "worst"] = "worst"
    figure: Literal["allocated", "reserved", "device"] = "allocated"


@cache
def memory_profile(name: str) -> MemoryProfile:
    """The description of that name."""
    return MemoryProfile(name, **descriptions("memory")[name])


def memory_constants(device: str, profile: str) -> MemoryConstants:
    """The constants of a profile on a device; where it was never fitted there, those of another device.

    Memory hardly depends on the device.
    """
    fitted, spread = (MEMORY_CONSTANTS.table(table).get(profile, {}) for table in ("constants", "spread"))
    where = device if device in fitted else next(iter(fitted), None)
    return MemoryConstants() if where is None else MemoryConstants(**fitted[where], spread=spread[where])
