"""How long a step takes: its parts one after the other, the data axis, the pipeline and the optimizer.

Compute is slowed by messages that run behind it (`parts.SLOWDOWN`); what does not fit behind it is exposed,
and the step waits. Times may be arrays over many layouts (see `ledger/setup.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import numpy as np

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.ledger import Message, wire_bytes
from fivefold.ledger.numbers import choose
from fivefold.ledger.optimizer import moment_bytes
from fivefold.ledger.setup import Figure, Number, Setup
from fivefold.models.inventory import parameters
from fivefold.models.spec import ModelSpec
from fivefold.planner.time.parts import Costs, left
from fivefold.planner.time.rates import memory_time, rate_between
from fivefold.planner.time.stack import OURS, Constants, Stack


@dataclass(frozen=True)
class Estimate:
    """Seconds of one optimizer step.

    step_time  all of it: the sum of the others
    compute    of the slowest pipeline rank, for all its micro-batches
    bubble     in which that rank waits for others
    optimizer  the update itself
    exposed    axis -> in which only messages of that axis run
    """

    step_time: Figure
    compute: Figure
    bubble: Figure
    optimizer: Figure
    exposed: dict[str, Figure]

    def settled(self, step_time: float) -> Estimate:
        """Of ONE layout, whose step was played since: what the estimate was off by is waiting for others."""
        off = step_time - self.step_time
        if self.bubble:
            return replace(self, step_time=step_time, bubble=self.bubble + off)
        exposed = self.exposed | {"dp": self.exposed["dp"] + off}
        return replace(self, step_time=step_time, exposed=exposed)


def estimate(
    setup: Setup, cluster: Cluster, stack: Stack = OURS, constants: Constants | None = None
) -> Estimate:
    """The step of each layout of a setup; pipelines by closed forms."""
    return estimated(Costs.of(setup, cluster, stack, constants))


def estimated(costs: Costs) -> Estimate:
    """As `estimate`, with a costs that may know some of its times already."""
    setup = costs.setup
    first, middle, last = costs.layers
    block, head = costs.block, costs.head
    piped = setup.piped
    goes_back = setup.pipeline.shape == "v"  # so that the first rank has the head too
    one = first * block.total + costs.embedding.total + np.where(piped & (not goes_back), 0.0, head.total)
    between = np.where(piped, middle * block.total, 0.0)
    end = np.where(piped, last * block.total + (0.0 if goes_back else head.total), 0.0)
    slowest = np.maximum(np.maximum(one, between), end)
    through = one + np.maximum(setup.pp - 2, 0) * between + end
    share = np.where(slowest == one, first, np.where(slowest == end, last, middle))
    count = setup.micro_batches
    busy = count * slowest
    exposed: dict[str, Figure] = {axis: count * share * took for axis, took in block.exposed.items()}
    compute = busy - sum(exposed.values())
    bubble, exposed["pp"] = _pipeline(costs, slowest, through)
    exposed["dp"] = state_time(costs)
    optimizer = optimizer_time(costs)
    step = busy + bubble + exposed["pp"] + exposed["dp"] + optimizer
    return Estimate(step, compute, bubble, optimizer, exposed)


def _pipeline(costs: Costs, slowest: Figure, through: Figure) -> tuple[Figure, Figure]:
    """Seconds in which the slowest rank waits: for micro-batches to come and go, and for messages."""
    setup, block = costs.setup, costs.block
    pp, rounds = setup.pp, setup.virtual_stages
    # Several stages on a rank shorten the wait for the first micro-batch, if there are others to compute.
    few = np.maximum(0, pp - setup.micro_batches) / np.maximum(1, pp - 1)
    fills = {"never": 0.0, "once": 1.0, "for each micro-batch": setup.micro_batches}[setup.pipeline.fills]
    fill = fills * (through - slowest) * (few + (1 - few) / rounds)
    if setup.pipeline.splits_backward:
        # What weight halves cannot fill, by the Zero Bubble paper: F + B - 2W of every F + B + W. A pipeline
        # with few micro-batches has too few of them (played, it is about three for two ranks).
        enough = np.minimum(1.0, setup.micro_batches / (1.5 * pp))
        fill = fill * np.maximum(0.0, 1 - enough * 3 * block.backward_weight / block.total)
    # A micro-batch's way there and back takes its messages' time too. As many are under way as the schedule
    # allows, and each waits for its share of it, as far as there are none to spare.
    around = 2.0 * (pp - 1) * rounds * costs.transfer
    spare = np.where(rounds > 1, (pp - 1) * slowest / rounds, 0.0)
    flying = pp * rounds + np.where(rounds > 1, pp - 1, 0)
    each = np.maximum(0.0, around - spare) / flying * rounds
    stalls = (setup.micro_batches - 1) * each + around / rounds
    return np.where(pp > 1, fill, 0.0), np.where(pp > 1, stalls, 0.0)


# --- the data axis -------------------------------------------------------------------------------------


def state_time(costs: Costs) -> Figure:
    """What the data axis leaves exposed in a step: gathering weights and summing gradients.

    With ZeRO 3 weights are gathered for every pass, one block ahead, and gradients summed behind the
    backward; without, they travel once a step, behind the first forward and the last backward as far as the
    stack can.
    """
    setup, stack, found = costs.setup, costs.stack, costs.traffic
    most = costs.most_layers
    ends = (*found.embedding_state, *(() if setup.spec.tied else found.head_state))
    # Interleaved stages end their last round one after the other, a pipeline's length apart.
    rounds = choose(setup.virtual_stages > 1, setup.pp, 1)
    total = costs.late(most)
    for phase, window, hidden in (
        ("forward", costs.block.forward, stack.gather_hidden),
        ("backward", costs.block.backward, stack.dp_hidden),
    ):
        mine = [message for message in found.block_state if message.phase == phase]
        others = [message for message in ends if message.phase == phase]
        if setup.zero == 3:
            each = _seconds(costs, mine) / setup.micro_batches
            waits = most * left(each, window, costs.slowdown) * setup.micro_batches
            # The ends have nothing to hide behind but other micro-batches.
            end = _seconds(costs, others) / setup.micro_batches
            waits = waits + end + (setup.micro_batches - 1) * left(end, most * window, costs.slowdown)
        else:
            once = most * _seconds(costs, mine) + _seconds(costs, others)
            if phase == "forward" and stack.broadcasts:
                once = _broadcasts(costs, mine, others, most)
            counts: list[Any] = [1, *(message.count for message in mine)]
            passes = reduce(np.maximum, counts)  # behind each of which some travel
            each = once / passes
            behind = np.minimum(hidden * each, most * window * rounds)
            waits = each - behind * (1 - costs.slowdown)
            # All but the last have the next micro-batch to hide behind as well.
            waits = waits + (passes - 1) * left(each, most * costs.block.total, costs.slowdown)
        total = total + waits
    return total


def _seconds(costs: Costs, messages: Iterable[Message]) -> Figure:
    """Of messages of weights and gradients, in the stack's own sizes."""
    narrow = costs.stack.gradient_bytes / costs.setup.precision.reduce_bytes
    total: Figure = 0.0
    for message in messages:
        if costs.stack.sums_whole and message.operation == "reduce_scatter":
            message = replace(message, operation="all_reduce")
        scale = 1.0 if message.operation == "all_gather" else narrow
        total = total + np.maximum(costs.state_message(message, scale), _on_bus(costs, message, scale))
    return total


def _on_bus(costs: Costs, message: Message, scale: float) -> Figure:
    """Seconds of a message by the bus bandwidth that its source measured; 0 where none was."""
    known = costs.stack.bus.get(message.operation)
    if known is None:
        return 0.0
    servers = message.ranks * costs.strides[message.group] / costs.cluster.server
    sent = wire_bytes(message.operation, message.count * message.payload * scale, message.ranks)
    return sent / rate_between(known, servers)


def _broadcasts(costs: Costs, mine: list[Message], others: list[Message], layers: Number) -> Figure:
    """Every rank's share of all weights sent to the others, one rank's after the other."""
    if not mine:
        return 0.0
    ranks = mine[0].ranks
    whole = layers * sum(message.payload for message in mine) + sum(message.payload for message in others)
    return ranks * costs.message(replace(mine[0], payload=whole // ranks))


# --- the optimizer -------------------------------------------------------------------------------------


def optimizer_time(costs: Costs) -> Figure:
    """The update: every weight's states read and written, on the ranks that hold them."""
    setup = costs.setup
    ends = 1.0 * setup.spec.vocab_size * setup.spec.dim / setup.tp
    if costs.ours and not setup.spec.tied:
        ends = ends * (1 + (setup.pp == 1))  # the embedding and the head
    dense, experts = _block_weights(setup.spec)
    block = dense / setup.tp + experts / (setup.tp * setup.ep)
    weights = costs.most_layers * block + ends
    share = setup.shard_ranks if setup.zero else 1
    touched = our_optimizer_bytes(setup) if costs.ours else costs.stack.optimizer_bytes
    return memory_time(weights / share * touched, costs.cluster)


def our_optimizer_bytes(setup: Setup) -> float:
    """Read and written for each weight: its gradient for the norm and for the update, its states both ways.

    In mixed precision the copy that computes is written anew.
    """
    precision = setup.precision
    states = precision.master_bytes + moment_bytes(setup, 1)
    anew = precision.compute_bytes if precision.mixed else 0
    return float(2 * precision.reduce_bytes + 2 * states + anew)


@cache
def _block_weights(spec: ModelSpec) -> tuple[int, int]:
    """Of one block: weights of all but the experts, and of the experts."""
    block = parameters(spec.model_copy(update={"layers": 1}))
    counts = {p.name: p.count for p in block if p.part == "blocks.0"}
    experts = sum(count for name, count in counts.items() if name.startswith("blocks.0.mlp.experts"))
    return sum(counts.values()) - experts, experts
