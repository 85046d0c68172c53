"""Brings matrices whole to their owners, and what these make of them to all that hold a block of them.

`axes/muon.py` has the plan: who owns what, in which round. While the matrices of a round are worked on, the
blocks of the next one travel to their owners, and the results of the one before travel back.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.axes.muon import Block, Key, Matrix, Plan
from fivefold.comm.collectives import Group, started_exchange
from fivefold.comm.compat import copy_each

Work = Callable[[Tensor], Tensor]
Pieces = Mapping[Key, Tensor]
Take = Callable[[Key, Tensor], None]
Whole = dict[Key, Tensor]


class Way(NamedTuple):
    """What one all-to-all takes: blocks by the rank that they go to, and by the rank that they come from."""

    sent: list[list[tuple[Key, Block]]]
    received: list[list[tuple[Key, Block]]]


class Round(NamedTuple):
    """A rank's share of a round.

    batches    by shape, the matrices that it owns
    own        of them, those of which it holds a block
    to_owners, back  messages; None where no rank of the stage sends anything
    """

    batches: dict[tuple[int, int], list[Key]]
    own: list[tuple[Key, Block]]
    to_owners: Way | None
    back: Way | None


class MatrixExchange:
    """One rank's part of the updates of a stage.

    rank   its number in the stage
    group  the stage's; None where it is alone
    dtype  in which matrices travel and are worked on
    """

    def __init__(self, plan: Plan, rank: int, group: Group, dtype: torch.dtype, device: torch.device):
        self.group, self.dtype, self.device = group, dtype, device
        self.rounds = [_round(plan, number, rank) for number in range(len(plan.rounds))]

    @torch.no_grad()
    def __call__(self, pieces: Pieces, work: Work, take: Take) -> None:
        """Work on every matrix once.

        pieces  this rank's blocks [rows, columns], in any dtype
        work    [b, rows, columns] -> the same, of matrices that this rank owns; it may use their memory
        take    is given each of this rank's blocks of the results, in `dtype`
        """
        ahead = self._to_owners(0, pieces) if self.rounds else None
        before: tuple[Round, Whole, Callable[[], Tensor] | None] | None = None
        for number, here in enumerate(self.rounds):
            arriving = ahead
            if number + 1 < len(self.rounds):
                ahead = self._to_owners(number + 1, pieces)
            done = self._worked_on(here, pieces, arriving, work)
            returning = self._sent(here.back, done)
            if before is not None:
                _finish(*before, take)
            before = here, done, returning
        if before is not None:
            _finish(*before, take)

    def _to_owners(self, number: int, pieces: Pieces) -> Callable[[], Tensor] | None:
        way = self.rounds[number].to_owners
        if way is None:
            return None
        return self._started(way, [pieces[key] for to in way.sent for key, _ in to])

    def _sent(self, way: Way | None, whole: Whole) -> Callable[[], Tensor] | None:
        """Send results to all that hold blocks of them."""
        if way is None:
            return None
        return self._started(way, [_block(whole[key], block) for to in way.sent for key, block in to])

    def _started(self, way: Way, blocks: list[Tensor]) -> Callable[[], Tensor]:
        packed = torch.empty(sum(map(_count, way.sent)), dtype=self.dtype, device=self.device)
        _copy(_unpacked(packed, way.sent), blocks)
        received, sent = ([_count(each) for each in side] for side in (way.received, way.sent))
        return started_exchange(packed, self.group, received, sent)

    def _worked_on(
        self, here: Round, pieces: Pieces, arriving: Callable[[], Tensor] | None, work: Work
    ) -> Whole:
        """This rank's matrices of a round, put together and worked on."""
        batches = [
            torch.empty(len(keys), *shape, dtype=self.dtype, device=self.device)
            for shape, keys in here.batches.items()
        ]
        whole = _by_key(here, batches)
        blocks, targets = [pieces[key] for key, _ in here.own], _parts(whole, here.own)
        if arriving is not None and here.to_owners is not None:
            blocks += _unpacked(arriving(), here.to_owners.received)
            targets += [part for each in here.to_owners.received for part in _parts(whole, each)]
        _copy(targets, blocks)
        return _by_key(here, [work(batch) for batch in batches])


def _nothing(ranks: int) -> Way:
    return Way([[] for _ in range(ranks)], [[] for _ in range(ranks)])


def _round(plan: Plan, number: int, rank: int) -> Round:
    """What one rank does in a round, in the order of the plan's matrices, which is that of messages."""
    batches = defaultdict[tuple[int, int], list[Key]](list)
    own: list[tuple[Key, Block]] = []
    to_owners, back = _nothing(plan.ranks), _nothing(plan.ranks)
    for matrix in plan.rounds[number]:
        mine = matrix.shares.of_rank.get(rank)
        if matrix.owner == rank:
            batches[matrix.shape].append(matrix.key)
            if mine is not None:
                own.append((matrix.key, mine))
            _receive(plan, matrix, rank, to_owners)
            for block in matrix.shares.blocks:
                for holder in block.holders:
                    if holder != rank:
                        back.sent[holder].append((matrix.key, block))
        elif mine is not None:
            back.received[matrix.owner].append((matrix.key, mine))
            if plan.sender(matrix.owner, mine) == rank:
                to_owners.sent[matrix.owner].append((matrix.key, mine))
    return Round(
        dict(batches),
        own,
        to_owners if plan.gathers(number) else None,
        back if plan.returns(number) else None,
    )


def _receive(plan: Plan, matrix: Matrix, rank: int, way: Way) -> None:
    for block in matrix.shares.blocks:
        if (sender := plan.sender(rank, block)) != rank:
            way.received[sender].append((matrix.key, block))


def _finish(here: Round, done: Whole, returning: Callable[[], Tensor] | None, take: Take) -> None:
    """Take the results of a round: this rank's own, and those that have come from other owners."""
    for key, block in here.own:
        take(key, _block(done[key], block))
    if returning is not None and here.back is not None:
        arrived = [key for each in here.back.received for key, _ in each]
        for key, result in zip(arrived, _unpacked(returning(), here.back.received), strict=True):
            take(key, result)


def _by_key(here: Round, batches: Iterable[Tensor]) -> Whole:
    """The matrices of some batches [b, rows, columns], each by itself."""
    lists = zip(here.batches.values(), batches, strict=True)
    return {key: matrix for keys, batch in lists for key, matrix in zip(keys, batch.unbind(), strict=True)}


def _parts(whole: Whole, blocks: Iterable[tuple[Key, Block]]) -> list[Tensor]:
    return [_block(whole[key], block) for key, block in blocks]


def _block(matrix: Tensor, block: Block) -> Tensor:
    (row, column), (rows, columns) = block.start, block.shape
    return matrix[row : row + rows, column : column + columns]


def _unpacked(buffer: Tensor, blocks: list[list[tuple[Key, Block]]]) -> list[Tensor]:
    """The blocks that lie one after the other in a buffer."""
    flat = [block for each in blocks for _, block in each]
    parts = buffer.split([block.size for block in flat])
    return [part.view(block.shape) for part, block in zip(parts, flat, strict=True)]


def _count(blocks: list[tuple[Key, Block]]) -> int:
    return sum(block.size for _, block in blocks)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        copy_each(targets, sources)
