"""What a layout takes and needs at the least: cheap figures, to sort out what need not be looked at."""

from __future__ import annotations

import numpy as np

from fivefold.ledger.optimizer import master_bytes, moment_bytes
from fivefold.ledger.setup import Figure, Setup
from fivefold.models.inventory import parameter_count
from fivefold.planner.memory.known_activations import activations
from fivefold.planner.time.parts import Costs


def least_memory(setup: Setup, device: str) -> Figure:
    """Bytes of the fullest rank: an even share of weights and states, and of gradients or activations.

    Gradients come as activations go, so only the more of the two is sure to be there. Under ZeRO 1 and 2 the
    compute weights stay whole on every rank in the middle of a step; under 3 they do not.
    """
    precision, pipeline = setup.precision, setup.pipeline
    share = parameter_count(setup.spec) / (1.0 * setup.tp * setup.pp * setup.ep)
    own = share / setup.shard_ranks if setup.zero else share
    weights = share * precision.compute_bytes if setup.zero < 3 else 0.0
    rest = own * (master_bytes(setup, 1) + moment_bytes(setup, 1)) + weights
    in_flight: Figure = 1.0 / setup.virtual_stages
    if pipeline.keeps_full:
        in_flight = np.minimum(setup.micro_batches, setup.pp) / (2 if pipeline.shape == "v" else 1)
    kept = activations("block", setup, device).saved * setup.spec.layers / setup.pp * in_flight
    return rest + np.maximum(kept, own * precision.reduce_bytes)


def least_time(costs: Costs) -> Figure:
    """Seconds of a step in which an even share of the blocks is computed, and nothing is waited for but the
    first and last micro-batch of a pipeline, where its schedule cannot avoid it.
    """
    setup = costs.setup
    filling = (setup.pp - 1) / setup.virtual_stages if setup.pipeline.surely_fills else 0.0
    return costs.block.total * setup.spec.layers / setup.pp * (setup.micro_batches + filling)
