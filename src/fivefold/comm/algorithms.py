"""Collectives written out: which chunk goes from which rank to which, step by step.

A tensor is cut into chunks, and an algorithm is a list of steps. The messages of one step travel at the same
time; a receiver adds a chunk to its own, or takes it in its place. That list is all there is: ranks send it
(`comm/send_receive.py`), `fivefold bench collectives --draw` shows it, and what it sends is counted in it.

    all-reduce, N bytes over P ranks         steps               the busiest rank sends
    naive                                    2                   (P - 1) N
    tree                                     2 ceil(log2 P)      ceil(log2 P) N
    ring                                     2 (P - 1)           2 (P - 1) N / P
    halving-doubling, P a power of two       2 log2 P            2 (P - 1) N / P

Where P is no power of two, halving and doubling takes two steps more: ranks in excess hand their tensor to a
neighbour before, and are handed the result behind.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """Chunks on their way from one rank to another: added to what the receiver has, or put in its place."""

    source: int
    to: int
    chunks: tuple[int, ...]
    adds: bool = False


Step = list[Move]
Steps = list[Step]


@dataclass(frozen=True)
class Algorithm:
    """One way to do a collective, for any number of ranks.

    steps   what is sent, by the number of ranks; a tree's root is rank 0
    chunks  how many chunks all ranks' tensors have together
    begins  which of them a rank has at first: (rank, ranks)
    ends    which of them it is to have at last, each with everyone's part that there is of it
    """

    operation: str
    name: str
    steps: Callable[[int], Steps]
    chunks: Callable[[int], int]
    begins: Callable[[int, int], range]
    ends: Callable[[int, int], range]


# --- one tensor, whole -------------------------------------------------------------------------------------


def naive(ranks: int) -> Steps:
    """Everyone sends its tensor to rank 0, which adds them up and sends the sum to everyone."""
    others = range(1, ranks)
    return [[Move(rank, 0, (0,), adds=True) for rank in others], [Move(0, rank, (0,)) for rank in others]]


def tree_reduce(ranks: int) -> Steps:
    """Half of the ranks that still have something to send hand it to the other half, until rank 0 has all."""
    steps, distance = [], 1
    while distance < ranks:
        senders = range(distance, ranks, 2 * distance)
        steps.append([Move(rank, rank - distance, (0,), adds=True) for rank in senders])
        distance *= 2
    return steps


def tree_broadcast(ranks: int) -> Steps:
    """The same tree backwards: whoever has the tensor sends it to one that has not."""
    return [
        [Move(move.to, move.source, move.chunks) for move in step] for step in reversed(tree_reduce(ranks))
    ]


def tree(ranks: int) -> Steps:
    """Up the tree to rank 0, and down again."""
    return tree_reduce(ranks) + tree_broadcast(ranks)


# --- a chunk for each rank ---------------------------------------------------------------------------------


def ring_reduce_scatter(ranks: int) -> Steps:
    """Each chunk goes once around, from neighbour to neighbour, and every rank on the way adds its own."""
    return [
        [Move(rank, (rank + 1) % ranks, ((rank - step - 1) % ranks,), adds=True) for rank in range(ranks)]
        for step in range(ranks - 1)
    ]


def ring_all_gather(ranks: int) -> Steps:
    """Each rank's chunk goes once around: a rank hands on what it was sent a step before."""
    return [
        [Move(rank, (rank + 1) % ranks, ((rank - step) % ranks,)) for rank in range(ranks)]
        for step in range(ranks - 1)
    ]


def ring(ranks: int) -> Steps:
    """Twice around: the sums are made on the first round and handed out on the second."""
    return ring_reduce_scatter(ranks) + ring_all_gather(ranks)


def pairwise(ranks: int) -> Steps:
    """Each rank has a chunk for each: in step s it sends the one for the rank s places on."""
    return [
        [Move(rank, (rank + step) % ranks, (rank * ranks + (rank + step) % ranks,)) for rank in range(ranks)]
        for step in range(1, ranks)
    ]


# --- halving and doubling ----------------------------------------------------------------------------------


def power_within(ranks: int) -> int:
    """The largest power of two that is not above `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def halving_doubling(ranks: int) -> Steps:
    """Pairs at half the distance each time: they share a block of chunks, and each adds up one half of it.

    Then backwards, each pair exchanging the halves that it has. A rank in excess of a power of two hands its
    tensor to a neighbour first, and is handed the result at last.
    """
    power = power_within(ranks)
    excess = ranks - power
    place = [*range(0, 2 * excess, 2), *range(2 * excess, ranks)]  # the ranks that exchange
    everything = tuple(range(power))
    halving: Steps = []
    distance = power // 2
    while distance:
        exchanges = []
        for mine in range(power):
            other = mine ^ distance
            first = other // distance * distance  # the half that the other one keeps
            half = tuple(range(first, first + distance))
            exchanges.append(Move(place[mine], place[other], half, adds=True))
        halving.append(exchanges)
        distance //= 2
    doubling = [[Move(move.to, move.source, move.chunks) for move in step] for step in reversed(halving)]
    if not excess:
        return halving + doubling
    pairs = [(2 * pair + 1, 2 * pair) for pair in range(excess)]
    before = [Move(extra, kept, everything, adds=True) for extra, kept in pairs]
    behind = [Move(kept, extra, everything) for extra, kept in pairs]
    return [before, *halving, *doubling, behind]


# --- all of them -------------------------------------------------------------------------------------------


def _one(ranks: int) -> int:
    return 1


def _each(ranks: int) -> int:
    return ranks


def _all(chunks: Callable[[int], int]) -> Callable[[int, int], range]:
    return lambda rank, ranks: range(chunks(ranks))


def _own(rank: int, ranks: int) -> range:
    return range(rank, rank + 1)


def _of_root(rank: int, ranks: int) -> range:
    return range(int(rank == 0))


def _row(rank: int, ranks: int) -> range:
    return range(rank * ranks, (rank + 1) * ranks)


def _column(rank: int, ranks: int) -> range:
    return range(rank, ranks * ranks, ranks)


def _squared(ranks: int) -> int:
    return ranks * ranks


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("all_reduce", "naive", naive, _one, _all(_one), _all(_one)),
        Algorithm("all_reduce", "ring", ring, _each, _all(_each), _all(_each)),
        Algorithm("all_reduce", "tree", tree, _one, _all(_one), _all(_one)),
        Algorithm(
            "all_reduce", "halving-doubling", halving_doubling, power_within, *[_all(power_within)] * 2
        ),
        Algorithm("broadcast", "tree-broadcast", tree_broadcast, _one, _of_root, _all(_one)),
        Algorithm("reduce", "tree-reduce", tree_reduce, _one, _all(_one), _of_root),
        Algorithm("all_gather", "ring-all-gather", ring_all_gather, _each, _own, _all(_each)),
        Algorithm("reduce_scatter", "ring-reduce-scatter", ring_reduce_scatter, _each, _all(_each), _own),
        Algorithm("all_to_all", "pairwise", pairwise, _squared, _row, _column),
    )
}
"""By name, as `--draw` takes it."""


def chunk_sizes(elements: int, chunks: int) -> list[int]:
    """Elements of each chunk: ceil(elements / chunks), then what is left, then none."""
    size = -(-elements // chunks)
    return [max(0, min(size, elements - chunk * size)) for chunk in range(chunks)]


Held = list[dict[int, tuple[int, ...]]]
"""By rank, each chunk that it has, and how often every rank's own part is in it."""


def held(algorithm: Algorithm, ranks: int) -> list[Held]:
    """Who has what before the first step and after each: the algorithm run on marks instead of numbers."""

    def mark(rank: int) -> tuple[int, ...]:
        return tuple(int(rank == other) for other in range(ranks))

    now: Held = [dict.fromkeys(algorithm.begins(rank, ranks), mark(rank)) for rank in range(ranks)]
    found = [now]
    for step in algorithm.steps(ranks):
        after = [dict(chunks) for chunks in now]
        for move in step:
            for chunk in move.chunks:
                part = now[move.source][chunk]
                if move.adds:
                    part = tuple(map(sum, zip(after[move.to][chunk], part, strict=True)))
                after[move.to][chunk] = part
        now = after
        found.append(now)
    return found


def sent_by(algorithm: Algorithm, ranks: int) -> list[tuple[int, int]]:
    """(messages, chunks) that each rank sends."""
    moves = [move for step in algorithm.steps(ranks) for move in step]
    return [
        (
            sum(move.source == rank for move in moves),
            sum(len(move.chunks) for move in moves if move.source == rank),
        )
        for rank in range(ranks)
    ]
