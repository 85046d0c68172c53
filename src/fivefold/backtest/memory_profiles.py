"""Memory of software stacks: a description of each kind, and its fitted constants.

Every stack names the description that fits it (`stacks.toml`): the bytes that its program keeps for each
weight, each token and each logit. What no description gives is fitted on published runs: at most two
constants for a description on a device, in `memory_constants.json`, by `fivefold backtest --fit`.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from fivefold.backtest.stacks import descriptions
from fivefold.planner.memory.fullest_rank import MemoryConstants
from fivefold.planner.time.fitted import FittedFile

MEMORY_CONSTANTS = FittedFile(Path(__file__).parent / "memory_constants.json")


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
    fits: Sequence[str] = ()
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
