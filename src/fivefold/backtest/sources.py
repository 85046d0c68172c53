"""Who published which runs: the software they ran, the network they ran on, and what their rows leave unsaid.

A row of published measurements names its source. What a source says once for all its rows (in its text, not
in its tables) stands here, so that blank cells are filled by a rule that can be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GBIT = 1e9 / 8


@dataclass(frozen=True)
class Source:
    """One publication.

    pattern     found in the row's `source`
    stack       name of the software stack (`stacks.toml`)
    network     bytes/s that one GPU can send to another server; None: as the GPU's usual server has it
    recompute   where the row's cell is blank
    zero        ZeRO stage where the row's `sharding` is blank
    batch       sequences of a step where the row's cell is blank; None: one micro-batch a rank
    flops       how its TFLOP/s count, for rows without step time or tokens/s: "model" (full attention),
                "causal", or "hardware" (full attention, with what recomputation repeats)
    """

    pattern: str
    stack: str
    network: float | None = None
    recompute: str = "none"
    zero: int = 0
    batch: int | None = None
    flops: str = "model"


SOURCES = (
    Source("Llama 3", "llama3", 400 * GBIT, zero=2),
    # Selene: one 200 Gb/s HDR InfiniBand card for each A100.
    Source("SC21 Table 2", "megatron-2021", 200 * GBIT, recompute="full", flops="hardware"),
    Source("SC21", "megatron-2021", 200 * GBIT, recompute="full", flops="hardware"),
    Source("Korthikanti", "megatron-2022", 200 * GBIT, recompute="selective"),
    Source("MT-NLG", "megatron-deepspeed", 200 * GBIT, recompute="full"),
    Source("PaLM", "palm", zero=3, recompute="full"),
    Source("MegaScale", "megascale", 200 * GBIT, recompute="selective", zero=1),
    Source("Megatron-LM README", "megatron-core", 400 * GBIT, zero=1),
    Source("torchtitan", "torchtitan", 400 * GBIT, zero=3),
    Source("fms-fsdp", "fms-fsdp", 100 * GBIT, zero=3),
    # H100: 3,200 Gb/s a server; A100: 800 or 1,600 Gb/s (its README names the clusters).
    Source("MosaicML", "llm-foundry", None, zero=3),
    Source("Megatron-Bridge", "nemo", None, zero=1, flops="causal"),
    Source("NeMo", "nemo", 400 * GBIT, zero=1),
    Source("dgxc-benchmarking.*maxtext", "maxtext", 400 * GBIT, zero=3),
    Source("dgxc-benchmarking", "nemo", 400 * GBIT, zero=1),
    Source("Megatron-MoE-ModelZoo", "megatron-moe", 400 * GBIT, zero=1, flops="causal"),
    Source("Primus", "primus", 400 * GBIT, zero=3),
    # Four 100 Gb/s cards for eight GPUs.
    Source("InternEvo", "internevo", 50 * GBIT, zero=1),
    Source("Zero Bubble", "zero-bubble", 100 * GBIT),
    # Jean Zay: four 100 Gb/s Omni-Path cards for eight GPUs.
    Source("BigScience", "megatron-deepspeed", 50 * GBIT, recompute="full", zero=1, flops="hardware"),
    Source("SimuMax", "simumax", None, zero=1),
    # 800 Gb/s between servers of eight.
    Source("vTrain", "vtrain", 100 * GBIT, recompute="full"),
    Source("HF Ultrascale", "nanotron", 400 * GBIT, batch=256),
)

UNKNOWN = Source("", "megatron-core", zero=1)
"""Of rows whose source is not listed."""


def find_source(name: str) -> Source:
    """The entry for a row's `source`, or `UNKNOWN`."""
    return next((source for source in SOURCES if re.search(source.pattern, name)), UNKNOWN)
