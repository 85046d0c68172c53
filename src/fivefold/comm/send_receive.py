"""The algorithms of `comm/algorithms.py`, run by ranks with nothing but send and receive.

Training uses the backend's own collectives, which are faster. These are for looking, learning and measuring
(`fivefold bench collectives`): tensors of any shape and dtype, groups of any size.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.algorithms import ALGORITHMS, Algorithm, Move, chunk_sizes
from fivefold.problems import BadInput, Problem

Chunks = dict[int, Tensor]
DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)


def all_reduce(x: Tensor, group: dist.ProcessGroup, by: str = "ring") -> Tensor:
    """The sum of every rank's `x` [...], on every rank; `by` naive, ring, tree or halving-doubling."""
    algorithm = ALGORITHMS[by]
    mine = x.flatten()
    pieces = mine.split(chunk_sizes(mine.numel(), algorithm.chunks(group.size())))
    found = _run(algorithm, dict(enumerate(pieces)), x.numel(), group)
    return torch.cat([found[chunk] for chunk in range(len(pieces))]).view(x.shape)


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    """The sum of every rank's `x` [...], on the group's rank 0; None on the others."""
    found = _run(ALGORITHMS["tree-reduce"], {0: x.flatten()}, x.numel(), group)
    return found[0].view(x.shape) if group.rank() == 0 else None


def broadcast(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What `x` [...] is on the group's rank 0, on every rank; the others' says its shape and dtype."""
    return _run(ALGORITHMS["tree-broadcast"], {0: x.flatten()}, x.numel(), group)[0].view(x.shape)


def all_gather(x: Tensor, group: dist.ProcessGroup, total: int | None = None) -> Tensor:
    """Every rank's `x` [n], one after the other: [P n].

    total  of pieces that are not equally long, as `reduce_scatter` leaves them: elements of all together
    """
    ranks, mine = group.size(), group.rank()
    sizes = [x.numel()] * ranks if total is None else chunk_sizes(total, ranks)
    room = {rank: x.new_empty(size) for rank, size in enumerate(sizes)}
    elements = sum(sizes) - sizes[mine] + x.numel()  # where this piece is too long or short, not the others'
    found = _run(ALGORITHMS["ring-all-gather"], room | {mine: x}, elements, group)
    return torch.cat([found[rank] for rank in range(ranks)])


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's `x` [n], cut into chunks of ceil(n / P): each rank gets its own."""
    pieces = x.split(chunk_sizes(x.numel(), group.size()))
    return _run(ALGORITHMS["ring-reduce-scatter"], dict(enumerate(pieces)), x.numel(), group)[group.rank()]


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Chunks of ceil(n / P) of every rank's `x` [n] dealt out: rank r gets everyone's chunk r, one by one."""
    ranks, rank = group.size(), group.rank()
    sizes = chunk_sizes(x.numel(), ranks)
    mine = {rank * ranks + to: piece for to, piece in enumerate(x.split(sizes))}
    theirs = {source * ranks + rank: x.new_empty(sizes[rank]) for source in range(ranks)}
    found = _run(ALGORITHMS["pairwise"], theirs | mine, x.numel(), group)
    return torch.cat([found[source * ranks + rank] for source in range(ranks)])


def _run(algorithm: Algorithm, chunks: Chunks, elements: int, group: dist.ProcessGroup) -> Chunks:
    """The chunks of this rank after the algorithm; room for each that it is to have is among those given.

    elements  of all chunks together: the same on all ranks, or they are told
    """
    some = next(iter(chunks.values()))
    _agree(algorithm, elements, some, group)
    device = some.device
    here = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
    now = {chunk: piece.to(here) for chunk, piece in chunks.items()}
    for step in algorithm.steps(group.size()):
        now |= _taken([move for move in step if _moves(move, now, group.rank())], now, group)
    return {chunk: piece.to(device) for chunk, piece in now.items()}


def _moves(move: Move, chunks: Chunks, rank: int) -> bool:
    """Whether a rank has to do with a move: of chunks without elements there is nothing to send."""
    return rank in (move.source, move.to) and any(chunks[chunk].numel() for chunk in move.chunks)


def _taken(moves: Sequence[Move], chunks: Chunks, group: dist.ProcessGroup) -> Chunks:
    """Send and receive what this rank has in a step; the chunks that changed."""
    rank, coming, sends = group.rank(), [], []
    for move in moves:
        whole = torch.cat([chunks[chunk] for chunk in move.chunks]) if len(move.chunks) > 1 else None
        message = chunks[move.chunks[0]].contiguous() if whole is None else whole
        if move.source == rank:
            sends.append(dist.P2POp(dist.isend, _as_bytes(message), group=group, group_peer=move.to))
        else:
            room = torch.empty_like(message)
            coming.append((move, room))
            sends.append(dist.P2POp(dist.irecv, _as_bytes(room), group=group, group_peer=move.source))
    for work in dist.batch_isend_irecv(sends) if sends else []:
        work.wait()
    changed: Chunks = {}
    for move, came in coming:
        parts = came.split([chunks[chunk].numel() for chunk in move.chunks])
        for chunk, part in zip(move.chunks, parts, strict=True):
            changed[chunk] = changed.get(chunk, chunks[chunk]) + part if move.adds else part
    return changed


def _as_bytes(x: Tensor) -> Tensor:
    """The same memory: a backend sends bytes of any dtype, and not every dtype."""
    return x.view(torch.uint8)


def _agree(algorithm: Algorithm, elements: int, like: Tensor, group: dist.ProcessGroup) -> None:
    """Raises `BadInput` on every rank where they give tensors of different sizes or dtypes.

    Such ranks would wait for each other without end, or abort: so they ask before they send.
    """
    mine = torch.tensor([elements, DTYPES.index(like.dtype)])
    if dist.get_backend(group) != "gloo":
        mine = mine.to(like.device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    given = [(int(size), str(DTYPES[int(dtype)]).removeprefix("torch.")) for size, dtype in everyone]
    usual = max(given, key=given.count)
    odd = [rank for rank, each in enumerate(given) if each != usual]
    if odd:
        said = ", ".join(f"rank {rank} has {given[rank][0]:,} of {given[rank][1]}" for rank in odd)
        hint = "Give every rank a tensor of the same size and dtype."
        text = f"{said}; the others have {usual[0]:,} of {usual[1]}"
        raise BadInput([Problem(f"{algorithm.operation} ({algorithm.name})", text, hint)])
