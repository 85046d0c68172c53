"""What a publication says once for all its rows: the program, the network, and what its rows leave blank."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"


@dataclass(frozen=True)
class Publication:
    """One entry of `records/publications.toml`.

    pattern     found in the row's `source`
    stack       name of the software stack (`stacks.toml`)
    gbits       Gbit/s that one GPU can send to another server; None: as the GPU's usual server has it
    recompute   where the row's cell is blank
    zero        ZeRO stage where the row's `sharding` is blank
    batch       sequences of a step where the row's cell is blank; None: one micro-batch a rank
    vocab       where neither the row nor records/models.json has it
    flops       how its TFLOP/s count, for rows without step time or tokens/s: "model" (full attention),
                "causal", or "hardware" (full attention, with what recomputation repeats)
    """

    pattern: str
    stack: str
    gbits: float | None = None
    recompute: str = "none"
    zero: int = 0
    batch: int | None = None
    vocab: int = 51_200
    flops: str = "model"


@cache
def record(name: str) -> dict[str, Any]:
    """What a TOML or JSON file of `records/` holds."""
    text = (RECORDS / name).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    return found


def first_match(entries: Sequence[dict[str, Any]], text: str) -> dict[str, Any]:
    """The first entry whose `pattern` is found in a text; empty where there is none."""
    return next((entry for entry in entries if re.search(entry["pattern"], text)), {})
