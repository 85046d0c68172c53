"""What one rank computes in a second: matrix products by dtype and shape, attention, memory, tiny operations.

Ranks of one machine share it, so all measure at the same time, as they would train. What is measured takes
turns, round after round, and a figure is the median over the rounds: whatever else slows the machine for a
second slows one round of everything, not one figure. Operands differ from call to call, so that no cache has
them: in training each comes from an operation of long ago.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.bench.timing import Call, seconds_of, window_of
from fivefold.hardware.cluster import TALL, Rates

Agree = Callable[[float], float]
"""The largest of what all ranks gave; returns when all have called it, so it also starts them together."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIDES = {"cpu": (32, 64, 128, 256, 512, 1024, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
HEADS = {"cpu": (4, 256, 32), "cuda": (16, 4096, 128)}
"""Heads, tokens and width of a head for attention."""
LARGE = {"cpu": 2**24, "cuda": 2**27}
"""Elements of a tensor that no cache holds."""
MOST_OPERANDS = 64
"""Sets of operands that take turns, where they are small."""
TINY_LAYERS = 30
LONGEST = 0.1
"""Seconds that a call is expected to take from which on it is not tried."""
LEAST_SIZES = 2
"""However slow the machine is, a table of fewer would say little."""
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Computed:
    """Rates of one rank, as in `hardware.Measured`."""

    matmul: dict[str, Rates]
    tall: dict[str, Rates]
    attention: dict[str, float]
    memory_bandwidth: float
    launch: float


@dataclass(frozen=True)
class _Figure:
    """Something to measure: `amount` FLOPs, bytes or operations in one call, made anew for each round."""

    amount: float
    prepared: Callable[[], Call]


def measure_compute(device: torch.device, agree: Agree, budget: float) -> Computed:
    """All rates, in about `budget` seconds; where that is not enough, without the largest products."""
    ends = time.perf_counter() + budget
    bench = _Bench(device, agree)
    launch, memory = bench.launch(), bench.memory()
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    attention = {name: bench.attention(dtype) for name, dtype in names.items()}
    square = {name: bench.tried(bench.products(dtype, 1)) for name, dtype in names.items()}
    tall = {name: bench.tried(bench.products(dtype, TALL)) for name, dtype in names.items()}
    figures = [launch, memory, *attention.values()]
    figures += [figure for table in (*square.values(), *tall.values()) for figure in table]
    seconds = bench.in_turns(figures, ends)

    def rates(tables: dict[str, list[_Figure]]) -> dict[str, Rates]:
        return {
            name: tuple((figure.amount, figure.amount / seconds[figure]) for figure in table)
            for name, table in tables.items()
        }

    return Computed(
        rates(square),
        rates(tall),
        {name: figure.amount / seconds[figure] for name, figure in attention.items()},
        memory.amount / seconds[memory],
        seconds[launch] / launch.amount,
    )


class _Bench:
    """A device, and what can be measured on it."""

    def __init__(self, device: torch.device, agree: Agree):
        self.device, self.agree = device, agree
        self.large = torch.randn(LARGE[device.type], device=device)
        self.numbers = {dtype: self.large.to(dtype) for dtype in DTYPES}
        # Autograd's own thread has no CUDA context before its first kernel, and a product would warn of that.
        torch.ones(1, device=device, requires_grad=True).exp().backward()

    def tried(self, figures: Iterator[_Figure]) -> list[_Figure]:
        """Those of a rising table that do not take too long, as all ranks agree."""
        found: list[_Figure] = []
        took = 0.0
        for figure in figures:
            if len(found) >= LEAST_SIZES and took * figure.amount / found[-1].amount > LONGEST:
                break
            call = figure.prepared()
            call()
            took = self.agree(seconds_of(call, self.device, 1))
            found.append(figure)
        return found

    def in_turns(self, figures: list[_Figure], ends: float) -> dict[_Figure, float]:
        """The median seconds of one call of each, over rounds in which all take their turn."""
        rounds: dict[_Figure, list[float]] = {figure: [] for figure in figures}
        number = 0
        while number < LEAST_ROUNDS or self.agree(time.perf_counter()) < ends:
            for figure, found in rounds.items():
                call = figure.prepared()
                call()
                self.agree(0.0)
                found.append(window_of(call, self.device))
            number += 1
        return {figure: statistics.median(found) for figure, found in rounds.items()}

    def operands(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Iterator[list[Tensor]]:
        """Random tensors of these shapes, again and again; as long as there are others, not the same ones."""
        sizes = [math.prod(shape) for shape in shapes]
        numbers = self.numbers[dtype]
        if sum(sizes) > len(numbers):
            return repeat([torch.randn(*shape, device=self.device).to(dtype) for shape in shapes])
        count = min(MOST_OPERANDS, len(numbers) // sum(sizes))
        pieces = numbers[: count * sum(sizes)].view(count, -1)
        return cycle(
            [part.view(shape) for part, shape in zip(piece.split(sizes), shapes, strict=True)]
            for piece in pieces
        )

    def products(self, dtype: torch.dtype, times: int) -> Iterator[_Figure]:
        """[times x n, n] x [n, n] for rising n."""
        for side in SIDES[self.device.type]:

            def prepared(side: int = side) -> Call:
                operands = self.operands(dtype, (times * side, side), (side, side))
                return lambda: torch.mm(*next(operands))

            yield _Figure(2.0 * times * side**3, prepared)

    def attention(self, dtype: torch.dtype) -> _Figure:
        """Causal attention forward and backward: 2 products and 5, half of the square each."""
        heads, tokens, width = HEADS[self.device.type]

        def prepared() -> Call:
            operands = self.operands(dtype, *[(1, heads, tokens, width)] * 4)

            def there_and_back() -> None:
                *inputs, ahead = next(operands)
                query, key, value = (x.detach().requires_grad_() for x in inputs)
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                torch.autograd.grad(mixed, (query, key, value), ahead)

            return there_and_back

        return _Figure(7 * 2.0 * heads * tokens * tokens * width / 2, prepared)

    def memory(self) -> _Figure:
        """Bytes of a sum of two large tensors into a third: two reads, one write."""

        def prepared() -> Call:
            one, two, out = self.large.clone(), self.large, torch.empty_like(self.large)
            return lambda: torch.add(one, two, out=out)

        return _Figure(3.0 * self.large.nbytes, prepared)

    def launch(self) -> _Figure:
        """Operations that have next to nothing to do, forward and backward through autograd.

        Layers of a few numbers one after the other: a product forward, two backward.
        """

        def prepared() -> Call:
            layers = [torch.randn(8, 8, device=self.device, requires_grad=True) for _ in range(TINY_LAYERS)]
            one = torch.randn(2, 4, 8, device=self.device)

            def there_and_back() -> None:
                x = one
                for weight in layers:
                    x = F.linear(x, weight)
                torch.autograd.grad(x, layers, one)

            return there_and_back

        return _Figure(3.0 * TINY_LAYERS, prepared)
