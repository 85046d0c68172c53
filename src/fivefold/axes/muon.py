"""Muon's exchange: who orthogonalises which matrix, and what is sent so that it can.

A matrix may lie in blocks on many ranks (ZeRO, tp), and each block on several (replicas). One of those ranks
owns it: in every update it gets the blocks it lacks, orthogonalises the whole, and sends each rank its block
of the result. So each matrix is orthogonalised once.

    round 1   blocks to owners | orthogonalise | blocks back
    round 2                      blocks to owners | orthogonalise | blocks back
    round 3                                         blocks to owners | ...

Messages of a round travel while another one's matrices are orthogonalised. Each is one all-to-all among the
ranks of a stage, without what stays on a rank. Experts that are spread over ranks are owned by those who hold
them. Where one rank has all of a round's matrices to itself, nothing is sent.

`axes/runtime/matrix_exchange.py` runs this plan, and the ledger reads its messages off it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from fivefold.axes.layout import STAGE, Layout, Place
from fivefold.axes.matrices import (
    is_matrix,
    matrix_counts,
    matrix_shapes,
    newton_schulz_flops,
    number_bytes,
)
from fivefold.axes.pieces import Cut, piece_of
from fivefold.axes.slabs import slab
from fivefold.axes.stages import parts_of
from fivefold.config import Job
from fivefold.ledger.ledger import Message
from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Figure, Number, Setup
from fivefold.models.inventory import Parameter, parameters
from fivefold.models.spec import ModelSpec

ROUNDS = 4
"""So many where anything is sent: the first gather and the last way back are all that nothing hides."""
ROUND_ELEMENTS = 64 * 2**20
"""More rounds where a rank would have more than this to orthogonalise in one: copies of it take memory."""
BEHIND = "orthogonalisation"
"""What messages of a round hide behind: the work on the matrices of another."""

Key = tuple[str, int]
"""A matrix: its parameter, and which of a stack of experts it is (0 where there is no stack)."""


class Block(NamedTuple):
    """A block of a matrix, and which ranks of the stage hold it, by their numbers in its group."""

    start: tuple[int, int]
    shape: tuple[int, int]
    holders: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


class Shares:
    """How the ranks of a stage share a matrix: alike for the same matrix of all layers."""

    def __init__(self, blocks: tuple[Block, ...]):
        self.blocks = blocks
        self.of_rank = {rank: block for block in blocks for rank in block.holders}
        self.ranks = tuple(sorted(self.of_rank))


@dataclass(frozen=True)
class Matrix:
    """One matrix of a stage, by whom it is orthogonalised, and in which round."""

    key: Key
    shape: tuple[int, int]
    shares: Shares
    owner: int
    round: int

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def cost(self) -> int:
        return newton_schulz_flops(*self.shape)


@dataclass(frozen=True)
class Plan:
    """An update's rounds in one stage; every rank of the stage has the same.

    ranks    of the stage
    replica  how many ranks in a row make one copy of the model, or of this stage of it
    """

    ranks: int
    replica: int
    matrices: tuple[Matrix, ...]

    @cached_property
    def rounds(self) -> tuple[tuple[Matrix, ...], ...]:
        count = max((matrix.round for matrix in self.matrices), default=-1) + 1
        found: list[list[Matrix]] = [[] for _ in range(count)]
        for matrix in self.matrices:
            found[matrix.round].append(matrix)
        return tuple(map(tuple, found))

    def gathers(self, number: int) -> bool:
        """Whether anybody has to send a block to an owner in a round."""
        return any(len(matrix.shares.blocks) > 1 for matrix in self.rounds[number])

    def returns(self, number: int) -> bool:
        """Whether any result has to be sent on in a round."""
        return any(len(matrix.shares.ranks) > 1 for matrix in self.rounds[number])

    def sender(self, owner: int, block: Block) -> int:
        """Who of a block's holders sends it to the owner: that one itself, or else one in its replica."""
        replica = self.replica
        return min(
            block.holders,
            key=lambda rank: (rank // replica != owner // replica, (rank - owner) % self.ranks),
        )

    def sent(self, number: int, rank: int) -> tuple[int, int]:
        """How many elements a rank sends in a round: of blocks to owners, and of results."""
        gathered = returned = 0
        for matrix in self.rounds[number]:
            mine = matrix.shares.of_rank.get(rank)
            if matrix.owner == rank:
                own = 0 if mine is None else mine.size
                returned += sum(block.size * len(block.holders) for block in matrix.shares.blocks) - own
            elif mine is not None and self.sender(matrix.owner, mine) == rank:
                gathered += mine.size
        return gathered, returned

    def most_elements(self, rank: int) -> int:
        """The most elements in the buffers of a rank at any moment: while it works on a round's matrices, or
        has sent their results.

        By then it has those of the next round on their way, and the results of the last one.
        """
        there, back, whole, work = [0], [0], [0], [0]
        for number, matrices in enumerate(self.rounds):
            gathered, returned = self.sent(number, rank)
            own = [matrix for matrix in matrices if matrix.owner == rank]
            others = (m.shares.of_rank.get(rank) for m in matrices if m.owner != rank)
            whole.append(sum(matrix.size for matrix in own))
            there.append(gathered + sum(m.size - m.shares.of_rank[rank].size for m in own))
            back.append(returned + sum(block.size for block in others if block is not None))
            # One shape after the other: a product that is not finished, and two of the smaller side.
            shapes = Counter(matrix.shape for matrix in own)
            temporary = (
                n * (rows * columns + 2 * min(rows, columns) ** 2) for (rows, columns), n in shapes.items()
            )
            work.append(whole[-1] + max(temporary, default=0))
        there.append(0)
        moments = (
            (there[n] + there[n + 1] + whole[n - 1] + back[n - 1] + whole[n], work[n], back[n])
            for n in range(1, len(work))
        )
        return max((always + max(either) for always, *either in moments), default=0)


def plan_of(job: Job, stage: int) -> Plan:
    """The plan of the ranks at `stage` along pp of a resolved job (without outer steps: of a replica)."""
    parts = tuple(part for parts in parts_of(job, stage).values() for part in parts)
    return _planned(job.spec, Layout.of(job), parts)


def number_in_stage(layout: Layout, place: Place) -> int:
    """Which rank of its stage the one at `place` is: their order in the group."""
    number = 0
    for axis in STAGE.split("*"):
        number = number * getattr(layout, axis) + getattr(place, axis)
    return number


def update_messages(job: Job, place: Place) -> Iterator[Message]:
    """What the rank at `place` sends in an update, two messages a round at most."""
    if job.optimizer.name != "muon":
        return
    layout, plan = Layout.of(job), plan_of(job, place.pp)
    number, width = number_in_stage(layout, place), number_bytes(precision_named(job.training.precision))
    last = len(plan.rounds) - 1
    for turn in range(len(plan.rounds)):
        gathered, returned = plan.sent(turn, number)
        for there, elements, alone in (
            (plan.gathers(turn), gathered, turn == 0),
            (plan.returns(turn), returned, turn == last),
        ):
            behind = None if alone else BEHIND
            payload = elements * width
            yield Message(
                "all_to_all", payload, STAGE, plan.ranks, int(there), "optimizer", behind, leaves=True
            )


def even_shares(setup: Setup, layers: Number) -> tuple[Figure, Figure]:
    """Elements that a rank sends in an update of `layers` blocks, to owners and back, were all shares even.

    Of one layout or of many; as if tp ranks never shared key and value heads.
    """
    ranks, shards = setup.ranks // setup.pp, setup.shard_ranks if setup.zero else 1
    dense, experts = matrix_counts(setup.spec)
    # Experts are sharded one by one where they can be, so that each is whole.
    apart = shards // setup.ep
    whole = (setup.ep == 1) | ((setup.spec.experts or 0) // setup.ep % np.maximum(apart, 1) == 0)
    cut = np.where(whole, 1, apart) if setup.zero else 1
    holding = setup.tp * (setup.dp_replicate * cut if setup.zero else ranks // setup.tp // setup.ep)
    there: Any = 0.0
    back: Any = 0.0
    for elements, blocks, holders in ((dense, setup.tp * shards, ranks), (experts, setup.tp * cut, holding)):
        there = there + elements * (1 - 1 / blocks)
        back = back + elements * (holders - 1) / blocks
    return there * layers / ranks, back * layers / ranks


def even_bytes(setup: Setup, layers: Number) -> Figure:
    """As `exchange_bytes`, for `layers` blocks, were all shares even. Of one layout or of many."""
    if setup.optimizer != "muon":
        return 0.0
    ranks, shapes = setup.ranks // setup.pp, matrix_shapes(setup.spec)
    owned = sum(matrix_counts(setup.spec)) * layers / ranks
    rounds = np.maximum(np.where(ranks > 1, ROUNDS, 1), np.ceil(owned / ROUND_ELEMENTS))
    whole = np.maximum(owned / rounds, max(rows * columns for rows, columns in shapes))
    there, back = (elements / rounds for elements in even_shares(setup, layers))
    most = max(newton_schulz_flops(*shape) * count for shape, count in shapes.items())
    costliest = next(s for s, count in shapes.items() if newton_schulz_flops(*s) * count == most)
    work = whole * (1 + 2 * min(costliest) / max(costliest))
    # Messages are sent from one buffer and come into another.
    elements: Figure = 4 * there + 2 * back + 2 * whole + np.maximum(work, 2 * back)
    return elements * number_bytes(setup.precision)


def exchange_bytes(job: Job, place: Place) -> int:
    """The most bytes that an update's buffers take on the rank at `place`."""
    if job.optimizer.name != "muon":
        return 0
    elements = plan_of(job, place.pp).most_elements(number_in_stage(Layout.of(job), place))
    return elements * number_bytes(precision_named(job.training.precision))


@lru_cache(maxsize=64)
def _planned(spec: ModelSpec, layout: Layout, parts: tuple[str, ...]) -> Plan:
    known: dict[tuple[str, tuple[int, ...]], list[Shares]] = {}
    found: list[tuple[Key, tuple[int, int], Shares]] = []
    for parameter in parameters(spec):
        if parameter.part in parts and is_matrix(spec, parameter.name, parameter.shape):
            kind = parameter.name.removeprefix(parameter.part), parameter.shape
            if kind not in known:
                known[kind] = _shared(spec, layout, parameter)
            rows, columns = parameter.shape[-2:]
            found += [((parameter.name, n), (rows, columns), each) for n, each in enumerate(known[kind])]
    return Plan(layout.stage.ranks, layout.shard_ranks * layout.tp, tuple(_dealt(found, layout.stage.ranks)))


def _shared(spec: ModelSpec, layout: Layout, parameter: Parameter) -> list[Shares]:
    """How the ranks of a stage share a parameter: the only matrix, or each of a stack."""
    cut = Cut(spec, layout.tp, layout.ep, layout.pp > 1, True)
    piece = [piece_of(parameter, parameter.part, cut, tp_rank) for tp_rank in range(layout.tp)]
    stack = parameter.shape[0] if len(parameter.shape) == 3 else 1
    holders: list[dict[tuple[tuple[int, int], tuple[int, int]], list[int]]]
    holders = [defaultdict(list) for _ in range(stack)]
    for rank in range(layout.stage.ranks):
        place = layout.stage.place(rank)
        start, shape = slab(spec, layout, place, piece[place.tp], parameter.shape)
        (row, column), (rows, columns) = start[-2:], shape[-2:]
        first, count = (start[0], shape[0]) if len(shape) == 3 else (0, 1)
        for number in range(first, first + count if rows * columns else first):
            holders[number][(row, column), (rows, columns)].append(rank)
    return [
        Shares(tuple(Block(*where, tuple(ranks)) for where, ranks in of_one.items())) for of_one in holders
    ]


def _dealt(matrices: list[tuple[Key, tuple[int, int], Shares]], ranks: int) -> Iterator[Matrix]:
    """Owners and rounds: the costliest first, each to who has the least so far of those that hold some of it.

    So matrices of one shape follow each other, and what an owner has of a round is of few shapes. It has as
    much to do in one round as in another.
    """
    ordered = sorted(matrices, key=lambda one: (-newton_schulz_flops(*one[1]), one[1]))
    costs, owned = [0] * ranks, defaultdict[int, list[tuple[Key, tuple[int, int], Shares]]](list)
    for one in ordered:
        owner = min(one[2].ranks, key=costs.__getitem__)
        costs[owner] += newton_schulz_flops(*one[1])
        owned[owner].append(one)
    count = _rounds(owned)
    for owner in sorted(owned):
        done = 0
        for key, shape, shares in owned[owner]:
            yield Matrix(key, shape, shares, owner, done * count // costs[owner])
            done += newton_schulz_flops(*shape)


def _rounds(owned: dict[int, list[tuple[Key, tuple[int, int], Shares]]]) -> int:
    """How many rounds the owners need."""
    every = [one for mine in owned.values() for one in mine]
    if not every:
        return 0
    most = max(sum(shape[0] * shape[1] for _, shape, _ in mine) for mine in owned.values())
    travels = any(len(shares.ranks) > 1 for _, _, shares in every)
    fewest = ROUNDS if travels else 1
    return min(max(fewest, -(-most // ROUND_ELEMENTS)), max(map(len, owned.values())))
