"""Other software stacks, as `stacks.toml` describes them: how they run, cut a model, and use memory.

What no description gives is fitted on published runs, by `fivefold backtest --fit`.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fivefold.ledger.setup import Setup
from fivefold.planner.memory.fullest_rank import MemoryConstants
from fivefold.planner.placement import Cut, Load, with_ends
from fivefold.planner.time.constants import FittedFile
from fivefold.planner.time.stack import OURS, Stack
from fivefold.problems import BadInput, Problem, did_you_mean

MEMORY_CONSTANTS = FittedFile(Path(__file__).parent / "memory_constants.json")


def descriptions(kind: str) -> dict[str, dict[str, Any]]:
    """The tables of one kind ("stack", "memory"), by name."""
    text = (Path(__file__).parent / "stacks.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)[kind])


def evenly(setup: Setup, stages: int) -> list[Load]:
    """As Megatron does: as many layers in each stage.

    Where that makes the count divide, embedding and head count as a layer each, as in BLOOM and Llama 3 405B.
    Where nothing does, stages are full until the layers run out, and the last have fewer: so NVIDIA's recipes
    cut the 61 layers of DeepSeek-V3, and so DeepSpeed's `partition_balanced` did in BLOOM's days. What others
    do then is not known; no published run of theirs needs it. Every stage has a layer if there are enough of
    them, else the first ones have none.
    """
    layers = setup.spec.layers
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return with_ends([each - 1, *[each] * (stages - 2), each - 1])
    each, left, counts = -(-layers // stages), layers, []
    for behind in reversed(range(stages)):
        counts.append(max(0, min(each, left - behind)))
        left -= counts[-1]
    return with_ends(counts)


def later_longer(setup: Setup, stages: int) -> list[Load]:
    """As InternEvo does (its `partition_uniform`): what does not divide goes to the last stages."""
    short, longer = divmod(setup.spec.layers, stages)
    return with_ends([short + (stage >= stages - longer) for stage in range(stages)])


def by_cost(setup: Setup, stages: int) -> list[Load]:
    """As nanotron does (its models/base.py): a stage takes parts until their costs exceed its share.

    The embedding, the last norm, the cast of the logits and the loss cost nothing. A stage behind the loss
    may be left with nothing at all.
    """
    spec = setup.spec
    layer = 4 * spec.heads * spec.head_dim * spec.dim + 3 * spec.ffn * spec.dim
    parts = [("embedding", 0), *[("layers", layer)] * spec.layers, ("norm", 0)]
    parts += [("head", spec.vocab_size * spec.dim), ("loss", 0), ("loss", 0)]  # the cast, then the loss
    total = sum(cost for _, cost in parts)
    held = [Counter[str]() for _ in range(stages)]
    stage = done = 0
    for part, cost in parts:
        held[stage][part] += 1
        done += cost
        stage += done > total * ((stage + 1) / stages)
    return [Load(has["layers"], has["embedding"], has["head"], min(1, has["loss"])) for has in held]


CUTS: dict[str, Cut] = {cut.__name__: cut for cut in (evenly, later_longer, by_cost)}
"""By the names that `stacks.toml` gives them."""


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
