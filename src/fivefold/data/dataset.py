"""What a loader draws from."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Sample(NamedTuple):
    """One sequence with the token that follows it.

    tokens     [seq_len + 1] int64
    documents  [seq_len + 1] int64: number of the token's document within this sample, from 0 up
    """

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64]


class Dataset(Protocol):
    """Samples by index. `sample` is pure: the same index always gives the same tokens."""

    @property
    def has_boundaries(self) -> bool:
        """Whether a sample may hold more than one document."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample: ...
