"""Documents to samples: which documents are held out, and how the rest becomes sequences.

The documents of a split, each with its end token, are laid end to end into one stream. Sample i is
`stream[i * seq_len : (i + 1) * seq_len + 1]`: neighbours share one token, so that each token but the
first is predicted exactly once an epoch. What is left at the stream's end, less than a sequence, is
not used. A document longer than what is left of its sequence goes on in the next one, and the pieces
do not see each other.
"""

import numpy as np
from numpy.typing import NDArray

from fivefold.data.dataset import Sample
from fivefold.data.hashing import key_of, scramble_all

HELDOUT_KEY = np.uint64(key_of("held-out documents"))


def split(offsets: NDArray[np.int64], heldout: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The spans of tokens to train on and to hold out, each [n, 2] (first token, one past the last).

    offsets [documents + 1] int64 are where documents begin. Whole documents are held out, picked by a
    hash of their number: the choice depends on the fraction alone, not on the training seed, and a
    larger fraction keeps what a smaller one held out. Each side gets at least one document. A source
    that is one single document is cut instead: its last tokens are held out.
    """
    if len(offsets) == 2:
        end = int(offsets[1])
        cut = end - max(1, round(end * heldout))
        return np.array([[0, cut]]), np.array([[cut, end]])
    words = scramble_all(np.arange(len(offsets) - 1, dtype=np.uint64) + HELDOUT_KEY)
    out = words < np.uint64(int(heldout * 2**64))
    out[np.argmin(words)] = True
    out[np.argmax(words)] = False
    spans = np.stack([offsets[:-1], offsets[1:]], axis=1)
    return spans[~out], spans[out]


class Windows:
    """The samples of one split of one source.

    tokens  [tokens] memory-mapped ids of the whole source
    spans   [n, 2] int64: the documents of this split
    """

    has_boundaries = True

    def __init__(self, tokens: NDArray[np.unsignedinteger], spans: NDArray[np.int64], seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.stream_ends = np.cumsum(spans[:, 1] - spans[:, 0])
        # Token t of the stream, in document d, is token t + shift[d] of the source.
        self.shift = spans[:, 1] - self.stream_ends
        self.stream_length = int(self.stream_ends[-1])

    def __len__(self) -> int:
        return max(0, (self.stream_length - 1) // self.seq_len)

    def sample(self, index: int) -> Sample:
        """Sample `index`: tokens and documents, [seq_len + 1] each."""
        begin = index * self.seq_len
        end = begin + self.seq_len + 1
        first, last = np.searchsorted(self.stream_ends, [begin, end - 1], side="right")
        ends = np.minimum(self.stream_ends[first : last + 1], end)
        lengths = np.diff(ends, prepend=begin)
        where = np.arange(begin, end) + np.repeat(self.shift[first : last + 1], lengths)
        return Sample(self.tokens[where].astype(np.int64), np.repeat(np.arange(len(lengths)), lengths))
