"""What layers in 8 bits take on one GPU, piece by piece: passes, products, a layer, a block.

    python -m benchmarks.fp8_layers [JOB] [--tiles] [--rowwise] [--small] [--section.key value ...]

Of one block of the job's model and its micro-batch (by default `benchmarks/h200_8b_l8.toml`). Passes are told
beside the rate at which the card copies, products in FLOP/s, layers and blocks forward and backward beside
bfloat16. `--tiles`: casts in tiles of several sizes. `--small`: tiny shapes, nothing compiled, to see on any
machine that it runs.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.axes.runtime import fp8_passes as passes
from fivefold.axes.runtime.fp8_numbers import (
    E4M3,
    E5M2,
    Scaled,
    cast_for_both,
    largest,
    largest_both,
    scale_for,
    scaled_product,
)
from fivefold.axes.runtime.fp8_product import Fp8Product, Input
from fivefold.bench.timing import Call, seconds_of, window_of
from fivefold.config import Job, load, resolve
from fivefold.training.build import build
from fivefold.training.run import attention_kernels

DEFAULT = Path(__file__).with_name("h200_8b_l8.toml")
ONE_BLOCK = ["--model.layers=1", "--model.vocab_size=512"]
SMALL = [
    "--model.dim=64",
    "--model.ffn=128",
    "--model.heads=4",
    "--model.kv_heads=2",
    "--training.seq_len=32",
]
SMALL += ["--training.compile=false", "--model.max_seq_len=32"]
TILES = ((128, 128, 8), (128, 128, 4), (64, 128, 8), (64, 128, 4), (128, 64, 8), (128, 64, 4), (64, 64, 4))
Row = tuple[str, ...]
Layers = dict[str, tuple[int, int]]
"""Inputs and outputs of each."""


class Machine:
    """Where things are timed; `quick`: one call of each is enough."""

    def __init__(self, quick: bool):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.quick = quick

    def seconds(self, call: Call) -> float:
        call()
        return seconds_of(call, self.device, 1) if self.quick else window_of(call, self.device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)


def pass_rows(machine: Machine, sizes: dict[str, tuple[int, int]], tiles: bool) -> Iterator[Row]:
    """Each pass over matrices of some sizes: microseconds, GB/s, and the part of the copy's rate."""
    whole = machine.random(*max(sizes.values()))
    copied = 4 * whole.numel() / machine.seconds(whole.clone)
    yield "copy", str(list(whole.shape)), "", f"{copied / 1e9:.0f}", "1.00"
    del whole
    for name, size in sizes.items():
        x = machine.random(*size)
        scale = scale_for(largest(x), E4M3)
        by_rows, by_columns = (scale_for(found, E4M3) for found in largest_both(x))
        calls: dict[str, tuple[int, Call]] = {
            "largest of all": (2, partial(passes.largest_magnitudes, x, False, False)),
            "largest of rows and columns": (2, partial(passes.largest_magnitudes, x, True, True)),
            "cast by rows": (3, partial(passes.cast_rows, x, scale, E4M3)),
            "cast by columns": (3, partial(passes.cast_columns, x, scale, E4M3, None)),
            "cast both ways": (4, partial(passes.cast_both, x, scale, scale, E4M3)),
            "cast both ways, rowwise": (4, partial(passes.cast_both, x, by_rows, by_columns, E4M3)),
        }
        if tiles and machine.device.type == "cuda":
            from fivefold.axes.runtime import fp8_kernels

            for high, wide, warps in TILES:
                tiled = partial(fp8_kernels.cast, x, scale, scale, E4M3, (high, wide), warps)
                calls[f"cast both ways, {high} x {wide}, {warps} warps"] = 4, tiled
        for what, (width, call) in calls.items():
            took = machine.seconds(call)
            rate = width * x.numel() / took
            figures = f"{took * 1e6:.0f}", f"{rate / 1e9:.0f}", f"{rate / copied:.2f}"
            yield f"{what}: {name}", str(list(size)), *figures


def product_rows(machine: Machine, tokens: int, layers: Layers) -> Iterator[Row]:
    """The three products of each layer: TFLOP/s in bf16, and in fp8 by scales and by how sums are made."""
    for name, (inputs, outputs) in layers.items():
        x, w, g = (machine.random(*size) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        calls: dict[str, list[Call]] = {
            "forward": [partial(F.linear, x, w)],
            "input": [partial(torch.mm, g, w)],
            "weight": [partial(torch.mm, g.t(), x)],
        }
        for rowwise in (False, True):
            of_x, of_w, of_g = (both_casts(*each, rowwise) for each in ((x, E4M3), (w, E4M3), (g, E5M2)))
            pairs = {
                "forward": (of_x[0], of_w[0].turned()),
                "input": (of_g[0], of_w[1]),
                "weight": (of_g[1].turned(), of_x[1]),
            }
            for which, (a, b) in pairs.items():
                factors = a.values, 1 / a.scale, b.values, 1 / b.scale
                calls[which] += [partial(scaled_product, *factors, fast) for fast in (True, False)]
        for which, several in calls.items():
            rates = [2e-12 * tokens * inputs * outputs / machine.seconds(call) for call in several]
            yield f"{name}, {which}", *(f"{rate:.0f}" for rate in rates)


def both_casts(x: Tensor, dtype: torch.dtype, rowwise: bool) -> tuple[Scaled, Scaled]:
    of_rows, of_columns = largest_both(x) if rowwise else [largest(x)] * 2
    return cast_for_both(x, scale_for(of_rows, dtype), scale_for(of_columns, dtype), dtype)


def layer_rows(machine: Machine, tokens: int, layers: Layers, compiled: bool) -> Iterator[Row]:
    """A layer alone, forward and backward: milliseconds in bf16 and in fp8, and how many times as fast."""
    for name, (inputs, outputs) in layers.items():
        x, w = (machine.random(*size).requires_grad_() for size in ((tokens, inputs), (outputs, inputs)))
        narrow = Fp8Product("layer", False, Input(1), None, None).to(machine.device)
        narrow.weight_scale = scale_for(largest(w.detach()), E4M3)
        took = []
        for linear in (F.linear, narrow):
            run: Callable[..., Tensor] = torch.compile(linear) if compiled else linear
            both = partial(there_and_back, partial(run, x, w), [x, w], machine.random(tokens, outputs))
            took.append(machine.seconds(both))
        yield name, *(f"{seconds * 1e3:.2f}" for seconds in took), f"{took[0] / took[1]:.2f}"


def block_rows(machine: Machine, jobs: dict[str, Job]) -> Iterator[Row]:
    """A block, forward and backward: milliseconds, and how many times as fast as the first."""
    first = None
    for name, job in jobs.items():
        model, length = build(job, machine.device).model, job.training.seq_len
        block = model.blocks["0"]
        x = machine.random(job.training.micro_batch or 1, length, job.spec.dim).requires_grad_()
        context = model.make_context(x, torch.arange(length, device=machine.device), None, None)
        forward = partial(model.run_block, block, x, context)
        both = partial(there_and_back, forward, [x, *block.parameters()], torch.randn_like(x))
        with attention_kernels(machine.device):
            took = machine.seconds(both)
        first = first or took
        yield name, f"{took * 1e3:.2f}", f"{first / took:.2f}"


def there_and_back(forward: Callable[[], Tensor], wanted: list[Tensor], gradient: Tensor) -> Any:
    return torch.autograd.grad(forward(), wanted, gradient)


def show(title: str, head: Row, rows: Iterator[Row]) -> None:
    """A table in Markdown, line by line as it comes."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", default=str(DEFAULT))
    parser.add_argument("--tiles", action="store_true", help="casts in tiles of several sizes")
    parser.add_argument("--rowwise", action="store_true", help="a block with scales of rows and columns, too")
    parser.add_argument("--small", action="store_true", help="tiny shapes, nothing compiled")
    options, overrides = parser.parse_known_args()
    words = [*ONE_BLOCK, *SMALL * options.small, *overrides]
    kinds: dict[str, list[str]] = {"bf16": [], "fp8 tensorwise": ["--training.fp8=tensorwise"]}
    if options.rowwise:
        kinds["fp8 rowwise"] = ["--training.fp8=rowwise"]
    small = ["--training.fp8_small=true"] * options.small
    jobs = {
        name: resolve(load(options.job, overrides=[*words, *more, *small * bool(more)]), 1)
        for name, more in kinds.items()
    }
    job, machine = jobs["bf16"], Machine(options.small)
    spec, tokens = job.spec, (job.training.micro_batch or 1) * job.training.seq_len
    layers = {
        "query and output": (spec.dim, spec.heads * spec.head_dim),
        "gate and up": (spec.dim, spec.ffn),
        "down": (spec.ffn, spec.dim),
    }
    sizes = {"tokens": (tokens, spec.dim), "hidden": (tokens, spec.ffn), "weight": (spec.ffn, spec.dim)}
    show("Passes", ("pass", "matrix", "us", "GB/s", "of a copy"), pass_rows(machine, sizes, options.tiles))
    kinds_of_product = (
        "bf16",
        *(f"{scales}, {sums}" for scales in ("one scale", "rowwise") for sums in ("fast", "exact")),
    )
    show("Products, TFLOP/s", ("product", *kinds_of_product), product_rows(machine, tokens, layers))
    show(
        "A layer, forward and backward",
        ("layer", "bf16, ms", "fp8, ms", "times"),
        layer_rows(machine, tokens, layers, job.training.compile),
    )
    show("A block, forward and backward", ("block", "ms", "times"), block_rows(machine, jobs))


if __name__ == "__main__":
    main()
