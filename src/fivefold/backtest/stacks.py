"""Other software stacks, as `stacks.toml` describes them."""

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.backtest.cuts import CUTS
from fivefold.planner.time.stack import OURS, Stack
from fivefold.problems import BadInput, Problem, did_you_mean


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
