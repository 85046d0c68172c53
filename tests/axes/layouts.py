"""The layouts that are held against one process: every axis alone, in pairs, in threes, and at random.

`make test` runs the cases that are not `slow`, `make test-all` the others. `docs/make_coverage.py` turns the
same lists into the table of docs/coverage.md.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fivefold.axes.checks import check
from tests.cases import GEMMA, SPEC, TIED, Case

DENSE = SPEC | {"layers": 8}
TIED_DEEP = TIED | {"layers": 8}
MOE = SPEC | {"layers": 4, "experts": 4, "experts_per_token": 2, "shared_experts": 1}
SPECS = {"dense": DENSE, "tied": TIED_DEEP, "experts": MOE, "gemma": GEMMA | {"layers": 8}}

AXES: dict[str, dict[str, Any]] = {
    "dp_replicate": {"zero": 0},
    "dp_shard": {"zero": 3},
    "cp": {},
    "tp": {},
    "pp": {},
}
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")
ONE_STAGE = ("naive", "gpipe", "1f1b")
KINDS = ("ring", "ulysses", "allgather")
MODES = ("none", "full", "every-2", "selective")
BATCH, LENGTH = 16, 16


@dataclass(frozen=True)
class Split:
    """One case: a name, what kind of model, and a layout."""

    group: str
    name: str
    model: str
    layout: tuple[tuple[str, Any], ...]
    training: tuple[tuple[str, Any], ...] = ()
    slow: bool = True

    @property
    def degrees(self) -> dict[str, Any]:
        return dict(self.layout)

    @property
    def ranks(self) -> int:
        return math.prod(v for k, v in self.layout if k in AXES)

    def case(self) -> Case:
        training = {"global_batch": BATCH, "seq_len": LENGTH, "micro_batch": 1} | dict(self.training)
        layout = {"dp_replicate": 1, "dp_shard": 1} | self.degrees
        return Case(self.name, self.ranks, layout, training, spec=SPECS[self.model])


def split(
    group: str,
    model: str,
    layout: dict[str, Any],
    training: dict[str, Any] | None = None,
    slow: bool = True,
) -> Split:
    words = [f"{k}={v}" for k, v in layout.items()] + [f"{k}={v}" for k, v in (training or {}).items()]
    name = f"{model}: " + " ".join(words)
    return Split(group, name, model, tuple(layout.items()), tuple((training or {}).items()), slow)


def with_settings(degrees: dict[str, int]) -> dict[str, Any]:
    """Degrees with the ZeRO stage that they need: 3 where dp_shard is above 1, else 0."""
    return {**degrees, "zero": 3 if degrees.get("dp_shard", 1) > 1 else 0}


def alone() -> list[Split]:
    found = []
    for axis, degree, model in ((a, d, m) for a in AXES for d in (2, 4) for m in ("dense", "tied")):
        found.append(split("one axis", model, with_settings({axis: degree}), slow=degree > 2))
    for sequence_parallel in (False,):
        layout = with_settings({"tp": 2}) | {"sequence_parallel": sequence_parallel}
        found += [split("one axis", model, layout, slow=False) for model in ("dense", "tied")]
    found.append(split("one axis", "dense", {"cp": 2, "zero": 3}, slow=False))
    return found


def pairs() -> list[Split]:
    found = []
    for one, other in combinations(AXES, 2):
        for model in ("dense", "tied"):
            layout = with_settings({one: 2, other: 2})
            found.append(split("two axes", model, layout, slow=model == "dense"))
    return found


def triples() -> list[Split]:
    found = []
    for number, three in enumerate(combinations(AXES, 3)):
        layout = with_settings(dict.fromkeys(three, 2))
        found.append(split("three axes", ("dense", "tied")[number % 2], layout))
    return found


def schedules() -> list[Split]:
    found = []
    for schedule in SCHEDULES:
        fast = schedule in ("naive", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev")
        for model in ("dense", "tied"):
            layout = {"pp": 2, "schedule": schedule}
            found.append(split("schedules", model, layout, slow=not (fast and model == "tied")))
        for zero in (1, 2, 3):
            layout = {"pp": 2, "dp_shard": 2, "zero": zero, "schedule": schedule}
            found.append(split("schedules", "tied" if zero == 2 else "dense", layout))
        found.append(split("schedules", "dense", {"pp": 2, "tp": 2, "schedule": schedule}))
        layout = {"pp": 2, "dp_shard": 2, "tp": 2, "zero": 3, "schedule": schedule}
        found.append(split("schedules", "dense", layout))
        found.append(split("schedules", "dense", {"pp": 4, "schedule": schedule}))
    return found


def contexts() -> list[Split]:
    found = []
    for kind in KINDS:
        for cp in (2, 4):
            for model in ("dense", "tied"):
                layout = {"cp": cp, "cp_kind": kind}
                found.append(split("context kinds", model, layout, slow=cp > 2 or model == "tied"))
        for other in ({"tp": 2}, {"pp": 2}, {"dp_shard": 2, "zero": 2}):
            found.append(split("context kinds", "dense", {"cp": 2, "cp_kind": kind, **other}))
    return found


def experts() -> list[Split]:
    found = []
    for ep in (1, 2, 4):
        for zero in (1, 2, 3):
            layout = {"dp_shard": 4, "ep": ep, "zero": zero}
            found.append(split("experts", "experts", layout, slow=not (ep == 2 and zero == 3)))
    for ep in (1, 2):
        for other in ({"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp_replicate": 2}, {"tp": 2, "pp": 2}):
            layout = {"dp_shard": 2, "ep": ep, "zero": 3, **other}
            found.append(split("experts", "experts", layout))
        found.append(split("experts", "experts", {"cp": 2, "ep": ep, "zero": 0}, slow=ep == 1))
    found.append(
        split("experts", "experts", {"cp": 2, "ep": 2, "zero": 0}, {"recompute": "selective"}, False)
    )
    found.append(split("experts", "experts", {"tp": 2, "zero": 0}, slow=False))
    found.append(split("experts", "experts", {"pp": 2, "zero": 0}, slow=False))
    found.append(split("experts", "experts", {"dp_shard": 2, "cp": 2, "ep": 4, "zero": 3}))
    found.append(split("experts", "experts", {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 3, "schedule": "zbv"}))
    return found


def gemmas() -> list[Split]:
    """Soft caps, norms behind layers and alternating windows, which must survive every cut."""
    found = [
        split("gemma", "gemma", layout, training, slow=False)
        for layout, training in (
            ({"tp": 2}, {"recompute": "every-2"}),
            ({"pp": 2, "schedule": "interleaved"}, {}),
            ({"dp_shard": 2, "zero": 3}, {"recompute": "selective"}),
            ({"cp": 2, "cp_kind": "ulysses"}, {}),
        )
    ]
    for layout, training in (
        ({"tp": 2, "sequence_parallel": False}, {}),
        ({"tp": 4, "zero": 0}, {"recompute": "selective"}),
        ({"pp": 4}, {"recompute": "full"}),
        ({"pp": 2, "tp": 2, "schedule": "zbv"}, {}),
        ({"cp": 2, "cp_kind": "ulysses", "tp": 2}, {"recompute": "full"}),
        ({"dp_shard": 2, "zero": 2, "tp": 2, "pp": 2}, {"recompute": "full"}),
        ({"dp_shard": 2, "zero": 1, "cp": 2, "cp_kind": "ulysses", "pp": 2}, {}),
    ):
        found.append(split("gemma", "gemma", layout, training))
    return found


def drawn(count: int, seed: int, most: int) -> list[Split]:
    """Layouts drawn at random, of at most so many ranks, with everything else drawn too."""
    draw = random.Random(seed)
    found: dict[str, Split] = {}
    while len(found) < count:
        degrees = {axis: draw.choice((1, 1, 2, 2, 4)) for axis in AXES}
        ranks = math.prod(degrees.values())
        if not 2 <= ranks <= most:
            continue
        model = draw.choice(("dense", "tied", "experts"))
        layout: dict[str, Any] = {axis: degree for axis, degree in degrees.items() if degree > 1}
        sharing = degrees["dp_shard"] * degrees["cp"]
        if degrees["dp_shard"] > 1 or (sharing > 1 and draw.random() < 0.5):
            layout["zero"] = draw.choice((1, 2, 3))
        else:
            layout["zero"] = 0
        if layout["zero"] > 1 and draw.random() < 0.3:
            layout["reduce"] = "step"
        if degrees["pp"] > 1:
            layout["schedule"] = draw.choice(SCHEDULES)
            stages = degrees["pp"] * (1 if layout["schedule"] in ONE_STAGE else 2)
            if SPECS[model]["layers"] < stages:
                continue
        if degrees["cp"] > 1:
            layout["cp_kind"] = draw.choice(KINDS)
            if layout["cp_kind"] == "ulysses" and SPEC["heads"] % (degrees["cp"] * degrees["tp"]):
                continue
        if degrees["tp"] > 1:
            layout["sequence_parallel"] = draw.random() < 0.75
        if model == "experts" and sharing > 1:
            layout["ep"] = draw.choice([n for n in (1, 2, 4) if sharing % n == 0])
        data_ranks = degrees["dp_replicate"] * degrees["dp_shard"]
        micro = draw.choice((1, 2))
        if BATCH // data_ranks // micro < 2 * degrees["pp"]:
            micro = 1
        if degrees["pp"] > 1 and BATCH // data_ranks // micro < 2 * degrees["pp"]:
            continue
        training = {"micro_batch": micro, "recompute": draw.choice(MODES)}
        one = split("at random", model, layout, training)
        if not check(one.case().job()):
            found[one.name] = one
    return list(found.values())


def all_splits() -> dict[str, Split]:
    """Every case by name."""
    every = [
        *alone(),
        *pairs(),
        *triples(),
        *schedules(),
        *contexts(),
        *experts(),
        *gemmas(),
        *drawn(48, seed=3, most=8),
    ]
    found: dict[str, Split] = {}
    for one in every:
        if one.name not in found or found[one.name].slow:
            found[one.name] = one
    return found


SPLITS = all_splits()
