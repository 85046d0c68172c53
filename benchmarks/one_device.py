"""How near one device comes to its peak: matrix products by size, and a wide network of nothing else.

    python benchmarks/one_device.py [--width 8192] [--layers 8] [--batch 8192]

First square products of 512 to 32k, in bfloat16 on a GPU and float32 on a CPU: HFU is their rate over the
device's dense peak (on a CPU over the fastest seen), `short` after a rest and `lasting` in seconds of nothing
else: at its limit of power a GPU lowers its clock, and training lasts. Then training of a wide ReLU network,
forward, backward and SGD: MFU by 6 FLOPs a weight and row. It is a transformer's MLP without most of what is
bound by memory, and so about the most that training can reach.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn

from fivefold.bench.timing import Call, seconds_of
from fivefold.hardware.devices import find_device

SIDES = {"cuda": (512, 1024, 2048, 4096, 8192, 16384, 32768), "cpu": (512, 1024, 2048)}
ROUNDS = 5
REST, SHORT, LASTING = 0.5, 0.03, 2.0
"""Seconds without work before a short measurement, in it, and in a lasting one and before it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("width", 8192), ("layers", 8), ("batch", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = {side: products(side, device) for side in SIDES[device.type]}
    known = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    peak = known.peak_flops["bfloat16"] if known else max(max(row.values()) for row in rates.values())
    reached = wide_network(options.width, options.layers, options.batch, device)
    told = {
        "device": known.name if known else device.type,
        "peak_tflops": peak / 1e12,
        "hfu": {side: shares(row, peak) for side, row in rates.items()},
        "wide_network_mfu": shares(reached, peak),
    }
    print(json.dumps(told, indent=2))


def products(side: int, device: torch.device) -> dict[str, float]:
    """FLOP/s of [side, side] x [side, side]."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return rates_of(lambda: left @ right, 2.0 * side**3, device)


def wide_network(width: int, layers: int, batch: int, device: torch.device) -> dict[str, float]:
    """FLOP/s of training `layers` of [width, width] with ReLU between them on rows of random numbers."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, bias=False), nn.ReLU()]
    model = nn.Sequential(*parts).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(batch, width, device=device, dtype=dtype)

    def step() -> None:
        model(rows).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return rates_of(step, 6.0 * layers * width**2 * batch, device)


def rates_of(call: Call, flops: float, device: torch.device) -> dict[str, float]:
    """FLOP/s of calls of so many: the median of some tries after a rest each, and of seconds in a row."""
    call()
    once = statistics.median(after_a_rest(call, device, 1) for _ in range(ROUNDS))
    short = statistics.median(after_a_rest(call, device, max(1, round(SHORT / once))) for _ in range(ROUNDS))
    calls = max(1, round(LASTING / short))
    seconds_of(call, device, calls)
    return {"short": flops / short, "lasting": flops / seconds_of(call, device, calls)}


def after_a_rest(call: Call, device: torch.device, calls: int) -> float:
    time.sleep(REST)
    return seconds_of(call, device, calls)


def shares(rates: dict[str, float], peak: float) -> dict[str, float]:
    return {name: round(rate / peak, 3) for name, rate in rates.items()}


if __name__ == "__main__":
    main()
