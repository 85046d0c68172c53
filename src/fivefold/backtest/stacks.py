"""Other software stacks, as `stacks.toml` describes them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.backtest.cuts import CUTS
from fivefold.planner.time.stack import OURS, Stack
from fivefold.problems import BadInput, Problem, did_you_mean

DESCRIPTIONS = Path(__file__).parent / "stacks.toml"


def descriptions(kind: str) -> dict[str, dict[str, Any]]:
    """The tables of one kind ("stack", "memory"), by name."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(DESCRIPTIONS.read_text(encoding="utf-8"))[kind]
    return tables


@cache
def _named() -> dict[str, Stack]:
    stacks = [OURS]
    for name, row in descriptions("stack").items():
        stacks.append(Stack(name, cut=CUTS[row.pop("cut", "evenly")], **row))
    narrow = {"-fp8": "float8", "-fp4": "float4"}
    stacks += [
        replace(stack, name=stack.name + ending, dtype=dtype)
        for ending, dtype in narrow.items()
        for stack in tuple(stacks)
    ]
    return {stack.name: stack for stack in stacks}


def all_stacks() -> tuple[Stack, ...]:
    """Every stack that has a name."""
    return tuple(_named().values())


def stack_named(name: str) -> Stack:
    """The stack of that name; "-fp8" or "-fp4" after it: with matrix products in those."""
    stacks = _named()
    if name not in stacks:
        raise BadInput([Problem("stack", f"there is no stack '{name}'", did_you_mean(name, stacks))])
    return stacks[name]
