"""How long a step takes at the least: never longer than it is when it is played."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from fivefold.ledger.numbers import Known
from fivefold.ledger.setup import Figure, Number, Setup
from fivefold.planner.memory.known_activations import of_one
from fivefold.planner.placement import Cut, on_ranks
from fivefold.planner.play.timed import Timed
from fivefold.planner.time.parts import Costs


def least_time(costs: Costs) -> Figure:
    """Seconds that a step takes at the least, if the data axis' messages and the optimizer took none.

    No rank begins before the first micro-batch has come through the stages before its own, nor is a step over
    before the last one's gradients have gone back through them. In between a rank computes all its own.
    """
    parts = (costs.embedding, costs.block, costs.head)
    forward, backward = ([getattr(part, way) for part in parts] for way in ("forward", "backward"))
    halves = [part.backward_input for part in parts]
    back = halves if costs.setup.pipeline.splits_backward else backward
    longest: Figure = 0.0
    for rank in ranks(costs.setup, costs.stack.cut):
        busy, through = rank.held(forward) + rank.held(backward), rank.held(forward) + rank.held(back)
        there, returned = (rank.before(way) + rank.number * costs.transfer for way in (forward, back))
        longest = np.maximum(longest, _end(costs, there, busy, through, returned))
    return longest


def _end(costs: Costs, there: Figure, busy: Figure, through: Figure, returned: Figure) -> Figure:
    """When a step is over that a rank begins after `there`.

    busy      seconds of a micro-batch on the rank; `through`: without gradients of weights, which may wait
    returned  what comes behind the rank's last micro-batch
    """
    count = costs.setup.micro_batches
    return there + np.maximum(count * busy, count * through + returned)


def least_with_messages(costs: Costs, timed: Timed) -> Figure:
    """As `least_time`, with the data axis' messages and the optimizer.

    A block whose weights are gathered for every micro-batch takes as long as that, if not longer. The first
    micro-batch waits for weights, and behind the last one's way back the gradients of the first stage are
    reduced. A rank's messages do not run side by side, and slow the compute that they run behind.
    """
    setup, block, count = costs.setup, timed.block, costs.setup.micro_batches
    parts = (timed.embedding, block, timed.head)
    forward, backward = ([getattr(part, way) for part in parts] for way in ("forward", "backward"))
    halves = [part.backward - part.weight for part in parts]
    back = halves if setup.pipeline.splits_backward else backward
    gathers, again = block.gathers.without, block.gathers_again.without
    reductions = [part.reductions.with_once for part in parts]
    slowing = costs.slowdown / (1 + costs.slowdown)
    longest: Figure = 0.0
    for rank in ranks(setup, costs.stack.cut):
        passing = np.maximum(rank.held(forward), rank.layers * gathers)
        busy = passing + np.maximum(rank.held(backward), rank.layers * again)
        through = passing + np.maximum(rank.held(back), rank.layers * again)
        there = np.maximum(rank.before(forward), rank.layers_before * gathers)
        there = np.maximum(
            there + rank.number * costs.transfer,
            (rank.number > 0) * rank.own_first * (block.gathers.with_once - gathers),
        )
        returned = np.maximum(rank.before(back), rank.layers_before * again) + rank.number * costs.transfer
        tail = reductions[0] + rank.first_layers * reductions[1]
        returned = returned + np.where((setup.pp > 1) & (np.asarray(timed.at_once) == 0), tail, reductions[0])
        sent = count * rank.layers * (gathers + again) + (setup.pp == 1) * rank.layers * reductions[1]
        slowed = count * (rank.held(forward) + rank.held(backward)) + slowing * sent
        ends = (_end(costs, there, busy, through, returned), sent, slowed)
        longest = np.maximum(longest, np.maximum.reduce(np.broadcast_arrays(*ends)))
    return timed.step(longest)


@dataclass(frozen=True)
class Rank:
    """What one rank of a pipeline holds, and what is before it.

    layers_before  of the stages before its first
    own_first      layers of its first stage; `first_layers`: of the first of all
    """

    number: Number
    layers: Number
    embedding: Number
    head: Number
    layers_before: Number
    own_first: Number
    first_layers: Number

    def held(self, figures: Sequence[Figure]) -> Figure:
        """Of figures of the embedding, a block and the head, what the rank's own come to."""
        embedding, block, head = figures
        return self.embedding * embedding + self.layers * block + self.head * head

    def before(self, figures: Sequence[Figure]) -> Figure:
        """The same of the stages before its first."""
        return (self.number > 0) * figures[0] + self.layers_before * figures[1]


def ranks(setup: Setup, cut: Cut) -> list[Rank]:
    """Those that may be the slowest: the first, the last, and the outermost of those with the most layers."""
    known = _known(of_one(setup, zero=0, cp_kind="", recompute="none", compile=False), cut)
    return [Rank(*numbers) for numbers in known(setup.pp, setup.virtual_stages)]


@lru_cache(maxsize=256)
def _known(kind: Setup, cut: Cut) -> Known:
    """The ranks of pipelines that are alike but for their numbers."""

    def counted(pp: int, virtual: int) -> list[tuple[int, ...]]:
        held, stages = on_ranks(kind, cut, pp, virtual), cut(kind, pp * (virtual if pp > 1 else 1))
        layers = [stage.layers for stage in stages]
        before, most = [0, *accumulate(layers)], max(load.layers for load in held)
        longest = [number for number, load in enumerate(held) if load.layers == most]
        return [
            (n, held[n].layers, held[n].embedding, held[n].head, before[n], layers[n], layers[0])
            for n in (0, longest[0], longest[-1], pp - 1)
        ]

    return Known(lambda rows: [counted(*row) for row in rows.tolist()])
