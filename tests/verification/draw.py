"""Legal jobs, drawn at random: what users could ask for, and not what tests would think of."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from fivefold.axes.checks import check
from fivefold.config import Job, resolve
from fivefold.models.presets import PRESETS
from fivefold.problems import BadInput
from fivefold.schedules.table import SCHEDULES

MOST_RANKS = 8
AXES = ("pp", "tp", "cp", "dp_shard", "dp_replicate")
DEGREES = (2, 3, 5, 6, 2, 4, 3, 8, 7, 1)
CP_KINDS = ("ring", "ulysses", "allgather")
TRAINABLE = tuple(row.name for row in SCHEDULES.values() if row.use != "planning")
RECOMPUTE = ("none", "full", "sqrt", "every-3", "selective")


def drawn(number: int, seed: int) -> tuple[Job, int]:
    """Job `number` of a seed, and its ranks. Legal by every rule, at the size that it has."""
    random = Random(f"{seed} {number}")
    while True:
        settings, ranks = _settings(random, number)
        try:
            job = resolve(Job.model_validate(settings), ranks)
        except (BadInput, ValueError):
            continue
        if not check(job):
            return job, ranks


def _settings(random: Random, number: int) -> tuple[dict[str, Any], int]:
    """One axis and its degree follow from the number, so that each is had; all else is drawn."""
    degrees = dict.fromkeys(AXES, 1)
    degrees[AXES[number % len(AXES)]] = DEGREES[number // len(AXES) % len(DEGREES)]
    for axis in random.sample(AXES, 2):
        room = MOST_RANKS // math.prod(degrees.values())
        if degrees[axis] == 1:
            degrees[axis] = random.randint(1, max(1, room))
    layout: dict[str, Any] = {**degrees, "sequence_parallel": random.random() < 0.7}
    if degrees["dp_shard"] * degrees["cp"] > 1:
        layout["zero"] = random.choice((1, 2, 3) if degrees["dp_shard"] > 1 else (0, 1, 2, 3))
        if layout["zero"] > 1 and degrees["pp"] == 1:
            layout["reduce"] = random.choice(("auto", "micro-batch", "step"))
    if degrees["cp"] > 1:
        layout["cp_kind"] = random.choice(CP_KINDS)
    if degrees["pp"] > 1:
        layout["schedule"] = random.choice(TRAINABLE)
    model = _model(random, degrees)
    if "experts" in model or (model["preset"] in PRESETS and PRESETS[model["preset"]].experts):
        layout["ep"] = random.choice(
            (degrees["cp"], degrees["dp_shard"], degrees["dp_shard"] * degrees["cp"])
        )
    micro_batch, micro_batches = random.choice((1, 2, 3)), random.choice((1, 2, 3, 4, 6, 8, 12, 16))
    training = {
        "seq_len": random.choice((120, 240, 336, 600, 720, 840, 960, 1000, 1024)),
        "micro_batch": micro_batch,
        "global_batch": micro_batch * micro_batches * degrees["dp_shard"] * degrees["dp_replicate"],
        "recompute": random.choice(RECOMPUTE),
        "precision": random.choice(("bf16", "fp16", "fp32")),
        "clip": random.choice((0.0, 1.0)),
    }
    if "ep" in layout:
        training["balance"] = random.choice(("loss", "bias", "none"))
    optimizer = {"name": random.choice(("adamw", "muon", "sgd")), "ema": random.choice((None, 0.9))}
    sections = {"model": model, "layout": layout, "training": training, "optimizer": optimizer}
    return sections, math.prod(degrees.values())


def _model(random: Random, degrees: dict[str, int]) -> dict[str, Any]:
    """A preset, as it is or with one size that nothing but the layout's degrees divides."""
    names = [name for name, spec in PRESETS.items() if spec.experts or random.random() < 0.5]
    model: dict[str, Any] = {"preset": random.choice(names)}
    odd = random.random()
    if odd < 0.15:
        model["vocab_size"] = random.randrange(101, 5000, 2)
    elif odd < 0.3:
        heads = random.choice((3, 5, 7, 11, 13)) * degrees["tp"] * degrees["cp"]
        model |= {"heads": heads, "kv_heads": heads, "head_dim": 24, "dim": heads * 24}
    elif odd < 0.4:
        one_a_rank = degrees["dp_shard"] * degrees["cp"]
        if one_a_rank > 1:
            model |= {"experts": one_a_rank, "experts_per_token": min(2, one_a_rank)}
    return model
