"""What context parallelism costs attention: one rank's, alone, against plain attention of as many FLOPs.

    python benchmarks/attention_parts.py [--small] [--micro-batch 1] [--kinds ring,allgather] [--rank 0]

For each length of a sequence and each number of ranks: all of one rank's attention, forward and backward,
heads of llama3-8b in bfloat16. That is every block, what is copied for them, and putting them together, as
training runs it; the process group is a fake one, whose messages cost nothing but the host's time. Beside it
torch's own causal attention on one process, over as many sequences of the whole length as have the same
FLOPs: a rank has 1 / cp of them. Both take turns; the ratio is of the two medians.

A rank alone attends to numbers that never came. So times are those of training, results are not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.axes.runtime.ring import ring_attention
from fivefold.report.table import as_table

RANKS = (2, 4, 8)
WHOLE = ((8192, 32768, 131072), (32, 8, 128), torch.bfloat16)
SMALL = ((64, 128), (4, 2, 16), torch.float32)
"""Lengths; query heads, key heads and their width; numbers."""


def leaves(length: int, rows: int, heads: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the result, as projections and rotations leave them."""
    query, kv, width = heads
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = [torch.randn(rows, n, length, width, device=device, dtype=dtype) for n in (query, kv, kv)]
    by_token = torch.randn(rows, length, query, width, device=device, dtype=dtype)
    return [*(x.requires_grad_() for x in found), by_token.transpose(1, 2)]


def seconds(run: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    """Of forward and of backward, alone."""
    *asked, grad = inputs
    marks = [now()]
    out = run()
    marks.append(now())
    torch.autograd.grad(out, asked, grad)
    marks.append(now())
    return marks[1] - marks[0], marks[2] - marks[1]


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def compare(
    length: int, cp: int, rows: int, kind: str, heads: tuple[int, int, int], dtype: torch.dtype, turns: int
) -> list[tuple[float, float]]:
    """Seconds of forward and backward of a rank's share: by torch's own attention, and in parts."""
    plain, local = leaves(length, rows, heads, dtype), leaves(length // cp, rows, heads, dtype)
    group = dist.group.WORLD
    assert group is not None
    ways: list[tuple[Callable[[], Tensor], list[Tensor]]] = [
        (lambda: F.scaled_dot_product_attention(*plain[:3], is_causal=True, enable_gqa=True), plain),
        (lambda: ring_attention(*local[:3], [], kind, group.group_name)[0], local),
    ]
    took: list[list[tuple[float, float]]] = [[], []]
    for _ in range(turns + 1):  # the first makes plans
        for way, times in zip(ways, took, strict=True):
            times.append(seconds(*way))
    shares = (1 / cp, 1.0)
    found = []
    for share, times in zip(shares, took, strict=True):
        forward, backward = (statistics.median(each) for each in zip(*times[1:], strict=True))
        found.append((share * forward, share * backward))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short sequences of few heads: for a CPU")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--kinds", default="ring,allgather")
    parser.add_argument("--rank", type=int, default=0, help="of the first cp: the last one is the slowest")
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    lengths, heads, dtype = SMALL if options.small else WHOLE
    if torch.cuda.is_available():
        dtype = torch.bfloat16
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", torch.__version__)
    rows = []
    for cp in RANKS:
        rank = min(options.rank, cp - 1)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cp)  # type: ignore[no-untyped-call]
        for length in lengths:
            for kind in options.kinds.split(","):
                turns = max(2, options.turns * lengths[0] // length)
                plain, parts = compare(length, cp, options.micro_batch, kind, heads, dtype, turns)
                both = sum(parts) / sum(plain)
                times = (f"{sum(took) * 1e3:.3f}" for took in (plain, parts))
                ratios = (*(one / other for one, other in zip(parts, plain, strict=True)), both)
                rows.append((kind, f"{length:,}", str(cp), *times, *(f"{ratio:.2f}" for ratio in ratios)))
        dist.destroy_process_group()
    header = ("attention", "sequence", "cp", "plain, ms", "in parts, ms", "forward", "backward", "both")
    print(as_table(header, rows))


if __name__ == "__main__":
    main()
