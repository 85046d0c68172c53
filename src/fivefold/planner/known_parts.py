"""Times of each part of the model, looked up where they were computed before.

A part's time depends on few of a layout's numbers (`SHAPES`), and a search asks for the same ones again under
every schedule and every ZeRO stage: each is computed once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.arrays import taken
from fivefold.planner.memory_played import OTHERS, SHAPES
from fivefold.planner.parts import Bench, PartTime
from fivefold.planner.profiles import Stack

BITS = {"micro_batch": 14, "cp": 21, "tp": 14, "ep": 14}
"""For each of `SHAPES` in a code; layouts with larger numbers are not looked up."""

Codes = npt.NDArray[np.int64]


def codes(setup: Setup) -> Codes:
    """One number for the `SHAPES` of each layout."""
    columns = np.broadcast_arrays(*(np.asarray(getattr(setup, name), dtype=np.int64) for name in SHAPES))
    code: Codes = np.zeros_like(columns[0])
    for name, column in zip(SHAPES, columns, strict=True):
        code = (code << BITS[name]) + column
    return code


def shaped(setup: Setup, known: Codes) -> Setup:
    """The setup, with one layout for each code and no other axis split."""
    numbers: dict[str, Any] = dict.fromkeys(OTHERS, 1)
    for name in reversed(SHAPES):
        numbers[name] = known & ((1 << BITS[name]) - 1)
        known = known >> BITS[name]
    numbers["dp_shard"] = numbers["ep"]  # experts need ranks to be spread over
    return replace(setup, **numbers)


class KnownParts:
    """What the parts of one model take on one cluster."""

    def __init__(self, cluster: Cluster, stack: Stack):
        self.cluster, self.stack = cluster, stack
        self._known: dict[tuple[str, str], tuple[Codes, dict[str, PartTime]]] = {}

    def bench(self, setup: Setup) -> Bench:
        """What times of a setup's layouts are computed with; it knows those of the parts."""
        if any(np.max(getattr(setup, name)) >> bits for name, bits in BITS.items()):
            return Bench.of(setup, self.cluster, self.stack)
        wanted = codes(setup)
        known, parts = self._looked_up(setup, wanted)
        where = np.searchsorted(known, wanted)
        bench = Bench.of(setup, self.cluster, self.stack)
        for name, part in parts.items():
            vars(bench)[name] = taken(part, where)  # where a cached property keeps what it found
        return bench

    def _looked_up(self, setup: Setup, wanted: Codes) -> tuple[Codes, dict[str, PartTime]]:
        key = setup.recompute, setup.cp_kind
        known, parts = self._known.get(key, (np.empty(0, dtype=np.int64), {}))
        if not len(known) or not np.isin(wanted, known, assume_unique=False).all():
            known = np.union1d(known, wanted)
            bench = Bench.of(shaped(setup, known), self.cluster, self.stack)
            parts = {
                name: _filled(getattr(bench, name), len(known)) for name in ("block", "embedding", "head")
            }
            self._known[key] = known, parts
        return known, parts


def _filled(part: PartTime, count: int) -> PartTime:
    """The part, each of its figures an array."""

    def full(figure: Any) -> Any:
        return np.broadcast_to(figure, count)

    exposed = {axis: full(figure) for axis, figure in part.exposed.items()}
    return PartTime(full(part.forward), full(part.backward_input), full(part.backward_weight), exposed)
