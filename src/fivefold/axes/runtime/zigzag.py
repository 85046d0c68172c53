"""Which tokens each of n ranks holds, and who of them sees whom, so that causal attention is even work.

The sequence is cut into 2n chunks, and rank r holds chunks r and 2n-1-r: an early one, which sees little, and
a late one, which sees much. For n = 2 and four chunks a b c d, rank 0 holds a d and rank 1 holds b c:

                    keys of rank 0   keys of rank 1
    queries             a   d            b   c
    rank 0   a          ◣                           ◣  causal
             d          ■   ◣            ■   ■      ■  everything
    rank 1   b          ■                ◣
             c          ■                ■   ◣

A rank sees its own tokens causally; of an earlier rank, all of its queries see the first half of the keys; of
a later rank, the second half of its queries sees all keys. With several documents in a sequence less is
visible, but between different ranks it is always one rectangle a row: the only document that reaches from the
keys into the queries holds the last of these keys and the first of these queries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def local_part(x: Tensor, rank: int, ranks: int) -> Tensor:
    """[..., S] -> [..., S / ranks]: the tokens that `rank` holds, in the order in which it holds them."""
    chunks = x.chunk(2 * ranks, -1)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), -1)


def halves(rank: int, source: int, length: int) -> tuple[slice, slice]:
    """Which of `rank`'s queries see which keys of `source`, another rank; each holds `length` tokens."""
    if source < rank:
        return slice(0, length), slice(0, length // 2)
    return slice(length // 2, length), slice(0, length)


def document_spans(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Where the document of each token begins and ends (one past it), each [B, S] int64.

    documents  [B, S] integers, equal inside a document
    """
    length = documents.shape[1]
    index = torch.arange(length, device=documents.device)
    changes = documents[:, 1:] != documents[:, :-1]
    begins = torch.nn.functional.pad(changes * index[1:], (1, 0)).cummax(1).values
    ends = torch.nn.functional.pad(torch.where(changes, index[1:], length), (0, 1), value=length)
    return begins, ends.flip(1).cummin(1).values.flip(1)


def local_boundaries(documents: Tensor, rank: int, ranks: int) -> Tensor:
    """Where documents begin among `rank`'s tokens read row by row, then their number, repeated up to a
    power of two, so that there are few shapes: [N] int32.

    How many there are depends on the documents: call this on the CPU, where no device is waited for.

    documents  [B, S] integers, equal inside a document
    """
    mine = local_part(document_spans(documents)[0], rank, ranks)
    changes = torch.nn.functional.pad(mine[:, 1:] != mine[:, :-1], (1, 0), value=True)
    places = changes.flatten().nonzero().flatten()
    size = 1 << len(places).bit_length()
    padded = torch.full((size,), mine.numel(), dtype=torch.int32, device=documents.device)
    padded[: len(places)] = places
    return padded


def visible_counts(documents: Tensor, rank: int, ranks: int) -> Tensor:
    """How many of the first queries of `rank` see how many of the last keys of each source, [ranks, B, 2].

    Both are counted inside `halves`; where nothing is visible both are 0, and so they are for `rank` itself.

    documents  [B, S] integers, equal inside a document
    """
    begins, ends = document_spans(documents)
    chunk = documents.shape[1] // (2 * ranks)

    def held(begin: Tensor, end: Tensor, chunks: tuple[int, ...]) -> Tensor:
        """How many tokens of begin ... end lie in the chunks, [B]."""
        parts = [end.clamp(max=(c + 1) * chunk) - begin.clamp(min=c * chunk) for c in chunks]
        return torch.stack(parts).clamp(min=0).sum(0)

    found = []
    for source in range(ranks):
        late = 2 * ranks - 1
        queries = (rank, late - rank) if source < rank else (late - rank,)
        keys = (source,) if source < rank else (source, late - source)
        last_key = (keys[-1] + 1) * chunk - 1
        begin, end = begins[:, last_key], ends[:, last_key]
        seeing, seen = held(begin, end, queries), held(begin, end, keys)
        counts = torch.stack((seeing, seen.where(seeing > 0, 0)), 1)
        found.append(torch.zeros_like(counts) if source == rank else counts)
    return torch.stack(found)
