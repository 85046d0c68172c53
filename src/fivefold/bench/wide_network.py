"""`fivefold bench mlp`: FLOP/s of training a wide ReLU network.

It is a transformer's feed-forward layers without most of what is bound by memory, and so about the most that
training can reach. Each layer has its three products in a step: forward, for its weights and for its input.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fivefold.bench.asked import Asked
from fivefold.bench.reached import DTYPES, Point, Reached, Sweep, multiplying, name_and_peaks, reached
from fivefold.comm.world import DeviceKind, device_of
from fivefold.problems import Problem

USUAL: dict[DeviceKind, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "cuda": (("bf16",), (8192,)),
    "cpu": (("fp32",), (1024,)),
}
"""Dtypes and rows."""
USUAL_SHAPE: dict[DeviceKind, tuple[int, int]] = {"cuda": (8192, 8), "cpu": (1024, 4)}
"""Width and layers."""


@dataclass(frozen=True)
class Shape:
    """`layers` of [width, width], with ReLU behind each."""

    width: int
    layers: int

    def flops(self, rows: int) -> float:
        """Of a step: 6 for each weight and row."""
        return 6.0 * self.layers * self.width**2 * rows

    def needs(self, dtype: str, rows: int) -> float:
        """Bytes, about: weights and gradients; rows before and behind each ReLU, and a loss in float32."""
        weights, one = self.layers * self.width**2, rows * self.width
        return (2.0 * weights + (2 * self.layers + 4) * one) * DTYPES[dtype].torch.itemsize + 12.0 * one


def shape_of(kind: DeviceKind, width: int | None, layers: int | None) -> tuple[Shape, list[Problem]]:
    """The shape that is asked for, the usual one where it is not; and what is wrong with it."""
    usual = USUAL_SHAPE[kind]
    given = {"--width": width, "--layers": layers}
    wrong = [
        Problem(option, f"{number} is no size", "Give a whole number above 0.")
        for option, number in given.items()
        if number is not None and number < 1
    ]
    shape = Shape(usual[0] if width is None else width, usual[1] if layers is None else layers)
    return (Shape(*usual) if wrong else shape), wrong


def measure(asked: Asked, shape: Shape) -> Sweep:
    """Every dtype and number of rows, one after the other."""
    device = device_of(0, asked.device)
    name, peaks = name_and_peaks(asked.device, asked.dtypes)
    points = tuple(
        Point(dtype, rows, _training(shape, dtype, rows, device, asked.seconds))
        for dtype in asked.dtypes
        for rows in asked.sizes
    )
    told = {"width": shape.width, "layers": shape.layers}
    return Sweep("mlp", name, torch.__version__, asked.seconds, peaks, points, told)


def _training(shape: Shape, dtype: str, rows: int, device: torch.device, seconds: float) -> Reached:
    kind = DTYPES[dtype]
    make = partial(nn.Linear, bias=False, device=device, dtype=kind.torch)
    parts = [part for _ in range(shape.layers) for part in (make(shape.width, shape.width), nn.ReLU())]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # A gradient for the rows too, as a layer in the middle of a model has it: else one product were missing.
    x = torch.randn(rows, shape.width, device=device, dtype=kind.torch, requires_grad=True)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    with multiplying(kind):
        return reached(step, shape.flops(rows), device, seconds)
