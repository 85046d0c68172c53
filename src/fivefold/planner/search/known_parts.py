"""Times of each part of the model, of many layouts, each combination of shapes computed once.

A part's time depends on few of a layout's numbers (`SHAPES`), and a search asks for the same ones again under
every schedule and every ZeRO stage.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.numbers import Known, Rows
from fivefold.ledger.setup import Setup
from fivefold.planner.memory.known_activations import NUMBERS
from fivefold.planner.time.parts import Costs, PartTime
from fivefold.replay.sizes import SHAPES

PARTS = ("block", "embedding", "head")
AXES = ("cp", "ep", "tp")


class KnownParts:
    """What the parts of one model take on one cluster."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._known: dict[tuple[str, str, bool, bool], Known] = {}

    def costs(self, setup: Setup) -> Costs:
        """What times of a setup's layouts are computed with; it knows those of the parts."""
        kind = setup.recompute, setup.cp_kind, setup.compile, setup.gathers_in_8_bits
        known = self._known.setdefault(kind, Known(partial(self._figures, setup)))
        costs = Costs.of(setup, self.cluster)
        for name, figures in zip(PARTS, known(*(getattr(setup, name) for name in SHAPES)), strict=True):
            forward, backward_input, backward_weight, *waits = figures
            exposed = {axis: wait for axis, wait in zip(AXES, waits, strict=True) if wait.any()}
            # Where a cached property keeps what it found.
            vars(costs)[name] = PartTime(forward, backward_input, backward_weight, exposed)
        return costs

    def _figures(self, setup: Setup, rows: Rows) -> Any:
        """[layouts, parts, figures] of layouts with these shapes, whose other axes are not split."""
        numbers: dict[str, Any] = dict.fromkeys(NUMBERS, 1) | dict(zip(SHAPES, rows.T, strict=True))
        numbers["dp_shard"] = numbers["ep"]  # experts need ranks to be spread over
        costs = Costs.of(replace(setup, **numbers), self.cluster)
        figures = []
        for part in (getattr(costs, name) for name in PARTS):
            waits = (part.exposed.get(axis, 0.0) for axis in AXES)
            every = (part.forward, part.backward_input, part.backward_weight, *waits)
            figures.append([np.broadcast_to(figure, len(rows)) for figure in every])
        return np.moveaxis(np.array(figures), -1, 0)
