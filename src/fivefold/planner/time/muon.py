"""How long Muon takes over matrices: putting them together, orthogonalising, sending results back.

The plan of one layout (`axes/muon.py`) is exact; here owners have even shares, so that it is of many layouts.
"""

from typing import Any

import numpy as np

from fivefold.axes.layout import STAGE
from fivefold.axes.matrices import STEPS, computed_in, matrix_shapes, number_bytes
from fivefold.axes.muon import BEHIND, ROUNDS, even_shares
from fivefold.ledger.ledger import Message
from fivefold.ledger.setup import Figure
from fivefold.ledger.work import Work
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.rates import work_time


def orthogonalisation_time(costs: Costs) -> Figure:
    """Seconds of the matrices of the rank with the most layers.

    The messages of a round run behind the work on another, but for the first way there and the last way back.
    """
    there, back = (costs.message(message) for message in _messages(costs))
    hidden = (there + back) * (1 - 1 / ROUNDS)
    return there / ROUNDS + np.maximum(busiest_owner_time(costs), hidden) + back / ROUNDS


def _messages(costs: Costs) -> list[Message]:
    """What a rank sends to owners, and what owners send back."""
    setup = costs.setup.replica
    ranks = setup.ranks // setup.pp
    found = []
    for elements in even_shares(setup, costs.most_layers):
        payload: Any = elements * number_bytes(setup.precision) / ROUNDS
        found.append(Message("all_to_all", payload, STAGE, ranks, ROUNDS, "optimizer", BEHIND, leaves=True))
    return found


def busiest_owner_time(costs: Costs) -> Figure:
    """Seconds of the matrix products of an owner: an even share, and at least one of the costliest matrix."""
    setup = costs.setup.replica
    ranks = setup.ranks // setup.pp
    total: Figure = 0.0
    one: Figure = 0.0
    for shape, count in matrix_shapes(setup.spec).items():
        own = 1.0 * count * costs.most_layers / ranks
        together = np.maximum(own, 1.0)
        total = total + _seconds(costs, shape, together) * own / together
        one = np.maximum(one, _seconds(costs, shape, 1))
    found: Figure = np.maximum(total, one)
    return found


def _seconds(costs: Costs, shape: tuple[int, int], batch: Any) -> Figure:
    """Of a batch of matrices of one shape."""
    small, large = min(shape), max(shape)
    dtype, size = computed_in(costs.setup.precision), number_bytes(costs.setup.precision)
    found: Figure = 0.0
    for rows, inner, columns in ((small, large, small), (small, small, small), (small, small, large)):
        flops = 2.0 * batch * rows * inner * columns
        moved = 1.0 * size * batch * (rows * inner + inner * columns + rows * columns)
        product = Work("newton-schulz", "matmul", "forward", flops, moved, rows, inner, columns, batch, STEPS)
        found = found + work_time(product, costs.cluster, dtype, costs.stack, costs.constants)
    return found
