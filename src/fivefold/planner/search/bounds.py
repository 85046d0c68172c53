"""What a layout takes and needs at the least: cheap figures, to sort out what need not be looked at."""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold.ledger.optimizer import master_bytes, moment_bytes
from fivefold.ledger.setup import Figure, Setup
from fivefold.models.inventory import parameter_count
from fivefold.planner.memory.known_activations import activations
from fivefold.planner.time.parts import Costs


class Bounds:
    """Bounds of the layouts of one setup, one of each."""

    def __init__(self, costs: Costs):
        self.costs, self.setup, self.cluster = costs, costs.setup, costs.cluster

    def memory(self) -> Figure:
        """Bytes of the fullest rank: an even share of weights and states, and of gradients or activations.

        Gradients come as activations go, so only the more of the two is sure to be there. Under ZeRO 1 and 2
        the compute weights stay whole on every rank in the middle of a step; under 3 they do not.
        """
        setup, precision = self.setup, self.setup.precision
        share = parameter_count(setup.spec) / (1.0 * setup.tp * setup.pp * setup.ep)
        own = share / setup.shard_ranks if setup.zero else share
        weights = share * precision.compute_bytes if setup.zero < 3 else 0.0
        rest = own * (master_bytes(setup, 1) + moment_bytes(setup, 1)) + weights
        saved = activations("block", setup, self.cluster.device.kind).saved
        kept = saved * setup.spec.layers / setup.pp * in_flight(setup)
        more: Figure = np.maximum(kept, own * precision.reduce_bytes)
        return rest + more

    def time(self) -> Figure:
        """Seconds of a step in which an even share of the blocks is computed, and nothing is waited for but
        the first and last micro-batch of a pipeline.
        """
        setup = self.setup
        return self.costs.block.total * setup.spec.layers / setup.pp * (setup.micro_batches + filling(setup))


def in_flight(setup: Setup) -> Any:
    """Micro-batches that the fullest rank keeps at once, at least."""
    if not setup.pipeline.keeps_full:
        return 1.0 / setup.virtual_stages
    kept = np.minimum(setup.micro_batches, setup.pp)
    return kept / 2 if setup.pipeline.shape == "v" else 1.0 * kept


def filling(setup: Setup) -> Figure:
    """Micro-batches' time that a pipeline takes to fill and to drain, where its schedule cannot avoid it."""
    return (setup.pp - 1) / setup.virtual_stages if setup.pipeline.surely_fills else 0.0
