"""The `random` source: tokens out of nothing, for benchmarks and for verification."""

from dataclasses import dataclass

import numpy as np

from fivefold.data.dataset import Sample

# More than any run will draw, and small enough for `len`.
ENDLESS = 1 << 48


@dataclass(frozen=True)
class RandomTokens:
    """Tokens drawn uniformly from range(vocab_size), each sample a pure function of (key, index).

    document_length  mean length of a document; None makes every sequence one document
    """

    key: int
    seq_len: int
    vocab_size: int
    document_length: int | None = None

    @property
    def has_boundaries(self) -> bool:
        return self.document_length is not None

    def __len__(self) -> int:
        return ENDLESS

    def sample(self, index: int) -> Sample:
        """Sample `index`: tokens and documents, [seq_len + 1] each."""
        # Raw words of the generator, because numpy keeps those the same in every version.
        words = np.random.Philox(key=np.array([self.key, index], dtype=np.uint64)).random_raw(
            (2, self.seq_len + 1)
        )
        tokens = (words[0] % np.uint64(self.vocab_size)).astype(np.int64)
        if self.document_length is None:
            return Sample(tokens, np.zeros_like(tokens))
        ends = words[1] % np.uint64(self.document_length) == 0
        return Sample(tokens, np.cumsum(ends) - ends)
