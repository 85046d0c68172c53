"""Where in the whole parameter each element lies that a rank keeps of it."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.axes.runtime.data_split import local_slab


class Places(NamedTuple):
    """A rank's part of a parameter, as runs of elements that are neighbours in the whole, row-major.

    first  global index of its first element
    runs   from the outside in: how many times, and how far apart in the whole; the last are neighbours
    """

    first: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, parameter: Tensor) -> "Places":
        """Of this rank's part of a parameter, a DTensor where it is split."""
        return cls.of_slab(*local_slab(parameter), tuple(parameter.shape))

    @classmethod
    def of_slab(cls, offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> "Places":
        """Of the block of this shape that begins at `offset` in the whole."""
        strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
        runs = [(1, 1)]
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            count, apart = runs[0]
            if count * apart == stride or count == 1:  # goes on where the run inside of it ends
                runs[0] = (size * count, apart if count > 1 else stride)
            elif size > 1:
                runs.insert(0, (size, stride))
        if runs[-1][1] != 1:
            runs.append((1, 1))
        return cls(sum(o * s for o, s in zip(offset, strides, strict=True)), tuple(runs))

    def cut(self, limit: int) -> Iterator[tuple[int, int, "Places"]]:
        """Pieces of at most `limit` elements, one behind the other: where each starts and ends in this part,
        and its own places.
        """
        (count, apart), inner = self.runs[0], self.runs[1:]
        size = math.prod(each for each, _ in inner)
        if size > limit:
            for row in range(count):
                for start, stop, places in Places(self.first + row * apart, inner).cut(limit):
                    yield row * size + start, row * size + stop, places
            return
        step = limit // size
        for row in range(0, count, step):
            rows = min(step, count - row)
            places = Places(self.first + row * apart, ((rows, apart), *inner))
            yield row * size, (row + rows) * size, places

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Global indices of this part's own elements from `start` to `stop`, int64."""
        left = torch.arange(start, stop, device=device)
        if len(self.runs) == 1:
            return left + self.first
        found = torch.full_like(left, self.first)
        for count, apart in reversed(self.runs):
            found += left % count * apart
            left = left // count
        return found
