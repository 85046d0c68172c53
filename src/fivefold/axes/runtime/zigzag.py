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

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.models.attention import places


def local_part(x: Tensor, rank: int, ranks: int) -> Tensor:
    """[..., S] -> [..., S / ranks]: the tokens that `rank` holds, in the order in which it holds them."""
    chunks = x.chunk(2 * ranks, -1)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), -1)


def halves(rank: int, source: int, length: int) -> tuple[slice, slice]:
    """Which of `rank`'s queries see which keys of `source`, another rank; each holds `length` tokens."""
    if source < rank:
        return slice(0, length), slice(0, length // 2)
    return slice(length // 2, length), slice(0, length)


def document_begins(documents: Tensor) -> Tensor:
    """Where the document of each token begins, [B, S] int64; documents [B, S], equal inside one."""
    return torch.arange(documents.shape[1], device=documents.device) - places(documents, documents)


def local_boundaries(documents: Tensor, rank: int, ranks: int) -> Tensor:
    """Where documents begin among `rank`'s tokens read row by row, then their number, repeated up to a
    power of two, so that there are few shapes: [N] int32.

    How many there are depends on the documents: call this on the CPU, where no device is waited for.
    """
    mine = local_part(document_begins(documents), rank, ranks)
    changes = F.pad(mine[:, 1:] != mine[:, :-1], (1, 0), value=True)
    starts = changes.flatten().nonzero().flatten().int()
    size = 1 << len(starts).bit_length()
    return F.pad(starts, (0, size - len(starts)), value=mine.numel())


def visible_counts(documents: Tensor, rank: int, ranks: int) -> list[Tensor]:
    """How many of the first queries of `rank` see how many of the last keys of each source, [B, 2] each.

    Both are counted inside `halves`; where nothing is visible both are 0. Of `rank` itself they say nothing.
    """
    begins = document_begins(documents)
    found = []
    for source in range(ranks):
        queries, keys = halves(rank, source, documents.shape[1] // ranks)
        seeing = local_part(begins, rank, ranks)[:, queries]
        seen = local_part(begins, source, ranks)[:, keys]
        reaching = seen[:, -1:]  # the one document that may reach from the keys into the queries
        first, last = (seeing == reaching).sum(1), (seen == reaching).sum(1)
        found.append(torch.stack((first, last.where(first > 0, 0)), 1))
    return found
