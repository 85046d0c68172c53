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
    """The tables of one kind ("stack", "memory"), by name, with tuples for arrays."""
    tables = tomllib.loads(DESCRIPTIONS.read_text(encoding="utf-8"))[kind]
    found: dict[str, dict[str, Any]] = _frozen(tables)
    return found


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(entry) for key, entry in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@cache
def _named() -> dict[str, Stack]:
    plain = [OURS]
    for name, row in descriptions("stack").items():
        cut, bus = CUTS[row.pop("cut", "evenly")], row.pop("bus", {})
        plain.append(Stack(name, **row, cut=cut, bus=tuple(bus.items())))
    endings = {"": None, "-fp8": "float8", "-fp4": "float4"}
    return {
        stack.name + ending: stack if dtype is None else replace(stack, name=stack.name + ending, dtype=dtype)
        for ending, dtype in endings.items()
        for stack in plain
    }


def all_stacks() -> tuple[Stack, ...]:
    """Every stack that has a name."""
    return tuple(_named().values())


def stack_named(name: str) -> Stack:
    """The stack of that name; "-fp8" or "-fp4" after it: with matrix products in those."""
    stacks = _named()
    if name not in stacks:
        raise BadInput([Problem("stack", f"there is no stack '{name}'", did_you_mean(name, stacks))])
    return stacks[name]
