"""How long weights and gradients take: their messages on the data axis, and the optimizer's update."""

from dataclasses import replace
from functools import cache

import numpy as np

from fivefold.axes.data import rounded_numbers
from fivefold.axes.matrices import matrix_counts, number_bytes
from fivefold.axes.pieces import gradient_width
from fivefold.ledger.ledger import Message, wire_bytes
from fivefold.ledger.offload import travelling_bytes
from fivefold.ledger.setup import Figure, Setup
from fivefold.models.inventory import parameters
from fivefold.models.spec import ModelSpec
from fivefold.planner.time.constants import rate_between
from fivefold.planner.time.muon import orthogonalisation_time
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.rates import host_time, memory_time

ROUNDING = 100
"""Bytes read and written for a number that is rounded, sent and added up: by the operations that do so
(`comm/compression.py`), with error feedback."""


def state_message_time(costs: Costs, message: Message) -> Figure:
    """Seconds of a message of weights or gradients, in the stack's own sizes."""
    stack, measured = costs.stack, costs.cluster.measured
    if stack.sums_whole and message.operation == "reduce_scatter":
        message = replace(message, operation="all_reduce")
    gathers = message.operation == "all_gather"
    if gathers and stack.broadcasts:  # all blocks of a rank's share to all others, one rank's after the other
        blocks = costs.most_layers
        share = replace(message, payload=message.payload * blocks // message.ranks)
        return message.ranks * costs.message(share) / blocks
    narrow = 1.0 if gathers else stack.gradient_bytes / costs.setup.precision.reduce_bytes
    around = measured.sharded if measured is not None and costs.setup.zero else 0.0
    alone = costs.message(message, narrow) + message.count * around * (message.ranks > 1)
    return np.maximum(alone, _on_bus(costs, message, narrow)) + rounding_time(costs, message)


def rounding_time(costs: Costs, message: Message) -> Figure:
    """Seconds to round what is sent compressed, and to add up what arrives; 0 for other messages."""
    numbers = rounded_numbers(costs.setup, message)
    return memory_time(message.count * ROUNDING * numbers, costs.cluster)


def _on_bus(costs: Costs, message: Message, scale: float) -> Figure:
    """Seconds of a message by the bus bandwidth that its source measured; 0 where none was."""
    known = costs.stack.bus.get(message.operation)
    if known is None:
        return 0.0
    servers = message.ranks * costs.strides[message.group] / costs.cluster.server
    sent = wire_bytes(message.operation, message.count * message.payload * scale, message.ranks)
    return sent / rate_between(known, servers)


def optimizer_time(costs: Costs) -> Figure:
    """The update: every weight's states read and written, on the ranks that hold them.

    States in host memory travel meanwhile.
    """
    setup = costs.setup
    ends = 1.0 * setup.spec.vocab_size * setup.spec.dim / setup.tp
    if costs.ours and not setup.spec.tied:
        ends = ends * (1 + (setup.pp == 1))  # the embedding and the head
    dense, experts = _block_weights(setup.spec)
    sharded, expert_shards = (setup.shard_ranks, setup.shard_ranks / setup.ep) if setup.zero else (1, 1)
    block = dense / setup.tp / sharded + experts / (setup.tp * setup.ep) / expert_shards
    weights = costs.most_layers * block + ends / sharded
    if not (costs.ours and setup.optimizer == "muon"):
        touched = our_optimizer_bytes(setup) if costs.ours else costs.stack.optimizer_bytes
        update, cluster = memory_time(weights * touched, costs.cluster), costs.cluster
        travel = host_time(weights * travelling_bytes(setup), cluster)
        return update + travel if cluster.device.is_host else np.maximum(update, travel)
    dense, experts = matrix_counts(setup.spec)
    block = dense / setup.tp / sharded + experts / (setup.tp * setup.ep) / expert_shards
    matrices = costs.most_layers * block
    moved = (weights - matrices) * our_optimizer_bytes(setup) + matrices * matrix_bytes(setup)
    return memory_time(moved, costs.cluster) + orthogonalisation_time(costs)


def our_optimizer_bytes(setup: Setup) -> Figure:
    """Read and written for each weight: its gradient for the norm and for the update, its states both ways.

    In mixed precision the copy that computes is written anew.
    """
    precision = setup.precision
    states = precision.master_bytes + setup.moment_bytes(1)
    anew = precision.compute_bytes if precision.mixed else 0
    return 1.0 * (2 * gradient_width(setup) + 2 * states + anew)


def matrix_bytes(setup: Setup) -> float:
    """As `our_optimizer_bytes`, of a matrix under Muon, without what orthogonalising it takes.

    Its momentum is scaled and added to, then added to the gradient, which is packed: in three passes, or in
    one that rounds it. The weight decays and moves.
    """
    precision = setup.precision
    rounded = setup.states != "fp32"
    gradient = (2 + (2 if rounded else 3) * bool(setup.momentum)) * precision.reduce_bytes
    momentum = (2 if rounded else 5) * setup.momentum_bytes
    weight = (4 + 2 * setup.ema) * precision.master_bytes
    anew = precision.compute_bytes if precision.mixed else 0
    return float(gradient + momentum + weight + 2 * number_bytes(precision) + anew)


@cache
def _block_weights(spec: ModelSpec) -> tuple[int, int]:
    """Of one block: weights of all but the experts, and of the experts."""
    block = parameters(spec.model_copy(update={"layers": 1}))
    counts = {p.name: p.count for p in block if p.part == "blocks.0"}
    experts = sum(count for name, count in counts.items() if name.startswith("blocks.0.mlp.experts"))
    return sum(counts.values()) - experts, experts
