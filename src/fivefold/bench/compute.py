"""What one rank computes in a second: matrix products by dtype and shape, attention, memory, tiny operations.

Ranks of one machine share it, so all measure at the same time, as they would train.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.bench.timing import Call, median_seconds
from fivefold.hardware.cluster import Rates

Agree = Callable[[float], float]
"""The largest of what all ranks gave; returns when all have called it, so it also starts them together."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIDES = {"cpu": (32, 64, 128, 256, 512, 1024, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
SHORT_SIDE = {"cpu": 32, "cuda": 128}
HEADS = {"cpu": (4, 256, 32), "cuda": (16, 4096, 128)}
"""Heads, tokens and width of a head for attention."""
LARGE = {"cpu": 2**24, "cuda": 2**28}
"""Elements of a tensor that no cache holds."""
LONGEST = 0.1
"""Seconds that a call is expected to take from which on it is not tried."""
ENTRIES = 70
"""About how many figures are measured; each gets as much of the time."""


@dataclass(frozen=True)
class Computed:
    """Rates of one rank, as in `hardware.Measured`."""

    matmul: dict[str, Rates]
    skinny: dict[str, Rates]
    attention: dict[str, float]
    memory_bandwidth: float
    launch: float


def measure_compute(device: torch.device, agree: Agree, budget: float) -> Computed:
    """All rates, in about `budget` seconds; where that is not enough, without the largest products."""
    bench = _Bench(device, agree, budget)
    launch, memory_bandwidth = _launch(bench), _memory_bandwidth(bench)
    matmul, skinny, attention = {}, {}, {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        matmul[name] = _products(bench, dtype, None)
        skinny[name] = _products(bench, dtype, SHORT_SIDE[device.type])
        attention[name] = _attention(bench, dtype)
    return Computed(matmul, skinny, attention, memory_bandwidth, launch)


class _Bench:
    """A device, and the time there is to measure it."""

    def __init__(self, device: torch.device, agree: Agree, budget: float):
        self.device, self.agree, self.budget = device, agree, budget
        self.start = time.perf_counter()

    def seconds(self, call: Call) -> float:
        """The median time of a call, begun on all ranks together."""
        self.agree(0.0)
        return median_seconds(call, self.device, self.budget / ENTRIES)

    def has_time_for(self, expected: float) -> bool:
        """Whether a call of so many seconds can still be measured; all ranks get the same answer."""
        spent = (time.perf_counter() - self.start) / self.budget
        return self.agree(max(expected / LONGEST, spent)) < 1

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)


def _products(bench: _Bench, dtype: torch.dtype, rows: int | None) -> Rates:
    """[rows, n] x [n, n] for rising n, as far as there is time; square where `rows` is None."""
    found: list[tuple[float, float]] = []
    for side in SIDES[bench.device.type]:
        flops = 2.0 * (rows or side) * side * side
        if len(found) > 1 and not bench.has_time_for(flops / found[-1][1]):
            break
        left, right = bench.random(rows or side, side, dtype=dtype), bench.random(side, side, dtype=dtype)
        found.append((flops, flops / bench.seconds(lambda a=left, b=right: a @ b)))  # type: ignore[misc]
    return tuple(found)


def _attention(bench: _Bench, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention forward and backward: 2 products and 5, half of the square each."""
    heads, tokens, width = HEADS[bench.device.type]
    shape = (1, heads, tokens, width)
    query, key, value = (bench.random(*shape, dtype=dtype).requires_grad_() for _ in range(3))
    ahead = torch.ones_like(query)

    def there_and_back() -> None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(mixed, (query, key, value), ahead)

    flops = 7 * 2.0 * heads * tokens * tokens * width / 2
    return flops / bench.seconds(there_and_back)


def _memory_bandwidth(bench: _Bench) -> float:
    """Bytes/s of a sum of two large tensors into a third: two reads, one write."""
    one, two = (bench.random(LARGE[bench.device.type], dtype=torch.float32) for _ in range(2))
    out = torch.empty_like(one)
    return 3 * one.nbytes / bench.seconds(lambda: torch.add(one, two, out=out))


def _launch(bench: _Bench) -> float:
    """Seconds of an operation on one number, among many in a row."""
    one = bench.random(1, dtype=torch.float32)
    in_a_row = 100

    def many() -> None:
        for _ in range(in_a_row):
            one.add_(1.0)

    return bench.seconds(many) / in_a_row
