"""Imports between rooms go one way: each can be read, tested and replaced without those above it."""

from __future__ import annotations

import ast

import pytest

from tests.source import FILES, imported, is_package

MAY_IMPORT: dict[str, set[str]] = {
    "operators": set(),
    "problems": set(),
    "threads": set(),
    "toml": set(),
    "version": set(),
    "models": set(),
    "hardware": set(),
    "comm": set(),
    "data": set(),
    "schedules": set(),
    "storage": set(),
    "watch": {"comm"},
    "config": {"models", "schedules"},
    "ledger": {"models", "schedules"},
    "axes": {"models", "schedules", "ledger", "comm", "config"},
    "replay": {"models", "schedules", "ledger", "axes", "config"},
    "planner": {"models", "schedules", "hardware", "ledger", "axes", "replay", "config"},
    "backtest": {"models", "schedules", "hardware", "ledger", "axes", "config", "planner"},
    "interchange": {"models", "data", "storage", "config"},
    "training": {
        *("models", "schedules", "data", "storage", "axes", "comm", "ledger", "hardware", "config"),
        *("planner", "interchange", "watch"),
    },
}
EVERYONE_MAY_IMPORT = {"operators", "problems", "threads", "toml", "version"}
MAY_IMPORT["bench"] = MAY_IMPORT.keys() - EVERYONE_MAY_IMPORT
MAY_IMPORT["report"] = MAY_IMPORT.keys() - EVERYONE_MAY_IMPORT
MAY_IMPORT["launching"] = {"axes", "config", "training"}
ABOVE_ALL = {"verification", "api", "commands", "cli", "__init__", "__main__"}
TYPES_MAY_COME_FROM = {"config"}
"""A `Job` may be named in any annotation: under TYPE_CHECKING nothing is imported when the program runs."""


def room_of(module: str) -> str:
    """`fivefold.axes.data` -> `axes`; the package itself is `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def complaints(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one file, given its text and its dotted name."""
    room = room_of(module)
    if room in ABOVE_ALL:
        return []
    if room not in MAY_IMPORT:
        return [f"{module}: no rule says what the room '{room}' may import"]
    allowed = {room} | MAY_IMPORT[room] | EVERYONE_MAY_IMPORT
    return [
        f"{module} imports {name}, but {room} may import only {', '.join(sorted(allowed))}"
        for name, only_types in imported(ast.parse(source), module, is_package).items()
        if room_of(name) not in allowed | (TYPES_MAY_COME_FROM if only_types else set())
    ]


@pytest.mark.parametrize("module", FILES)
def test_imports_go_one_way(module: str) -> None:
    path = FILES[module]
    assert complaints(path.read_text(), module, is_package(path)) == []


def test_every_rule_is_about_a_room_that_exists() -> None:
    assert {room_of(module) for module in FILES} == MAY_IMPORT.keys() | ABOVE_ALL


def test_the_rules_have_no_circle() -> None:
    above: set[str] = set()
    rooms = dict(MAY_IMPORT)
    while rooms:
        free = {room for room, needs in rooms.items() if needs <= above}
        assert free, f"a circle among {sorted(rooms)}"
        above |= free
        rooms = {room: needs for room, needs in rooms.items() if room not in free}


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("from fivefold.axes.layout import Layout", "fivefold.models.decoder"),
        ("import fivefold.config", "fivefold.models.decoder"),
        ("import fivefold.training.step as step", "fivefold.axes.data"),
        ("from fivefold import training", "fivefold.axes.data"),
        ("from ..training import step", "fivefold.axes.data"),
        ("from fivefold import verify", "fivefold.training.run"),
        ("from fivefold.cli import app", "fivefold.training.run"),
        ("def late():\n    from fivefold.training.run import train_rank", "fivefold.comm.world"),
        ("if TYPE_CHECKING:\n    from fivefold.training.run import Summary", "fivefold.axes.data"),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from fivefold.config import Job", "fivefold.ledger.ledger"),
        ("from fivefold.models.spec import ModelSpec", "fivefold.data.corpus"),
        ("import json", "fivefold.newroom.file"),
    ],
)
def test_a_bad_import_is_found(line: str, module: str) -> None:
    assert len(complaints(line, module)) == 1


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("from fivefold.problems import BadInput", "fivefold.models.spec"),
        ("from fivefold.models.spec import ModelSpec", "fivefold.models.decoder"),
        ("from . import layout", "fivefold.axes.data"),
        ("from fivefold import models", "fivefold.axes.data"),
        ("if TYPE_CHECKING:\n    from fivefold.config import Job", "fivefold.ledger.ledger"),
        ("from fivefold.training.launch import train", "fivefold.verification"),
        ("import torch", "fivefold.models.decoder"),
    ],
)
def test_a_good_import_is_left_alone(line: str, module: str) -> None:
    assert complaints(line, module) == []


@pytest.mark.parametrize("module", [name for name in FILES if room_of(name) == "models"])
def test_models_know_nothing_of_ranks(module: str) -> None:
    text = FILES[module].read_text()
    for word in ("torch.distributed", "DTensor", "all_reduce", "process group"):
        assert word not in text
