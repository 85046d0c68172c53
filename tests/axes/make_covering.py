"""Writes covering.txt: layouts in which every two settings that go together do so, and some drawn at random.

    python -m tests.axes.make_covering

Of many layouts drawn at random, those are taken, one after the other, that show the most pairs of settings
which no layout before had, for the ranks they take.
"""

from __future__ import annotations

import math
import random
from itertools import combinations
from typing import Any

from fivefold.axes.checks import check
from fivefold.problems import BadInput
from tests.axes.layouts import AXES, COVERING, KINDS, SCHEDULES, Split, split

DRAWN, MOST_RANKS, AT_RANDOM = 3000, 8, 24
MODELS = ("dense", "tied", "experts", "gemma")
MODES = ("none", "full", "every-2", "selective")
Setting = tuple[str, Any]


def drawn(count: int, seed: int, most: int) -> list[Split]:
    """So many different layouts, of at most `most` ranks."""
    source, found = random.Random(seed), dict[str, Split]()
    while len(found) < count:
        if (one := draw(source, most)) is not None:
            found[one.name] = one
    return list(found.values())


def draw(source: random.Random, most: int = MOST_RANKS) -> Split | None:
    """One layout with everything about it drawn; None where it has too many ranks, or rules refuse it."""
    degrees = {axis: source.choice((1, 1, 2, 2, 4)) for axis in AXES}
    if not 2 <= math.prod(degrees.values()) <= most:
        return None
    model = source.choice(MODELS)
    layout: dict[str, Any] = {axis: degree for axis, degree in degrees.items() if degree > 1}
    sharing = degrees["dp_shard"] * degrees["cp"]
    shards = degrees["dp_shard"] > 1 or (degrees["cp"] > 1 and source.random() < 0.5)
    layout["zero"] = source.choice((1, 2, 3)) if shards else 0
    if layout["zero"] > 1:
        layout["reduce"] = source.choice(("step", "step" if degrees["pp"] > 1 else "micro-batch"))
    if degrees["pp"] > 1:
        layout["schedule"] = source.choice(SCHEDULES)
    if degrees["cp"] > 1:
        layout["cp_kind"] = source.choice(KINDS)
    if degrees["tp"] > 1:
        layout["sequence_parallel"] = source.random() < 0.5
    if model == "experts" and sharing > 1:
        layout["ep"] = source.choice([n for n in (1, 2, 4) if sharing % n == 0])
    training = {"micro_batch": source.choice((1, 2)), "recompute": source.choice(MODES)}
    if model == "experts":
        training["balance"] = source.choice(("loss", "bias"))
    one = split("at random", model, layout, training)
    try:
        return None if check(one.case().job()) else one
    except BadInput:
        return None


def settings(one: Split) -> set[Setting]:
    """What the layout is set to. Of an axis it counts whether it is used, not how many ranks it has."""
    degrees = {axis: one.degrees.get(axis, 1) > 1 for axis in (*AXES, "ep")}
    return set(({"model": one.model} | one.degrees | degrees | dict(one.training)).items())


def pairs(one: Split) -> set[frozenset[Setting]]:
    return {frozenset(two) for two in combinations(settings(one), 2)}


def cover(candidates: list[Split]) -> list[Split]:
    """Some of the candidates, in which every pair is that is in any."""
    shows = {one.name: pairs(one) for one in candidates}
    missing = set[frozenset[Setting]]().union(*shows.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda one: len(shows[one.name] & missing) / (2 + one.ranks))
        missing -= shows[best.name]
        chosen.append(best)
    return chosen


def written() -> str:
    """The text of covering.txt."""
    source = random.Random(3)
    allowed = {one.name: one for one in (draw(source) for _ in range(DRAWN * 10)) if one is not None}
    candidates = list(allowed.values())[:DRAWN]
    chosen = {one.name for one in cover(candidates)}
    others = [one.name for one in candidates if one.name not in chosen][:AT_RANDOM]
    groups = {"all pairs of settings": sorted(chosen), "at random": others}
    return "\n".join("\n".join([f"# {title}", *names, ""]) for title, names in groups.items())


if __name__ == "__main__":
    COVERING.write_text(written())
