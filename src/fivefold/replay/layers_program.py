"""Layers that several parts of the model are made of, on tensors that have only a size: see `program`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Arrived, Tensor
from fivefold.replay.operations import WIDE, Operations
from fivefold.replay.shared_program import Stream
from fivefold.replay.sizes import Sizes

Layer = Callable[..., Tensor]
Arrivals = Callable[[str], Arrived | None]
"""By a parameter's name within its part: what happens to its gradients."""


def nowhere(name: str) -> None:
    """Gradients that nobody takes are gone as soon as they are made."""


@dataclass
class Context:
    """What every block needs to know of a batch: the rotary tables, where there are any."""

    rope: tuple[Tensor, Tensor] | None


def make_context(t: Operations, sizes: Sizes) -> Context:
    if sizes.spec.positions != "rope":
        return Context(None)
    angles = t.empty(sizes.table, WIDE)
    cos, sin = t.empty(sizes.table, sizes.wide), t.empty(sizes.table, sizes.wide)
    del angles
    return Context((cos, sin))


class Parameters:
    """Makes the parameters of one part, of the compute dtype."""

    def __init__(self, t: Operations, sizes: Sizes, arrivals: Arrivals):
        self.t, self.sizes, self.arrivals = t, sizes, arrivals

    def __call__(self, name: str, elements: Number) -> Tensor:
        return self.t.parameter(elements, self.sizes.width, self.arrivals(name))

    def maybe(self, wanted: bool, name: str, elements: Number) -> Tensor | None:
        return self(name, elements) if wanted else None


class Norm:
    """Over rows of `length` elements; with a `stream`, the one through which tp ranks enter a layer."""

    def __init__(
        self,
        t: Operations,
        make: Parameters,
        name: str,
        length: int,
        rms: bool,
        bias: bool,
        stream: Stream | None = None,
    ):
        self.t, self.length, self.rms, self.stream = t, length, rms, stream
        self.parameters = [make(f"{name}.weight", length)]
        if bias:
            self.parameters.append(make(f"{name}.bias", length))

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.elements // self.length
        if self.rms:
            normed = self.t.rms_norm(x, self.parameters[0], rows)
        else:
            normed = self.t.layer_norm(x, self.parameters, rows)
        return normed if self.stream is None else self.stream.enter(normed)


def stream_norm(t: Operations, make: Parameters, name: str) -> Norm:
    spec = make.sizes.spec
    rms = spec.norm == "rmsnorm"
    stream = Stream(t, make.sizes) if make.sizes.several_tp else None
    return Norm(t, make, name, spec.dim, rms, not rms and spec.norm_bias, stream)


class Row:
    """A linear layer whose result goes to the stream; under tp each rank has some of its inputs."""

    def __init__(
        self, t: Operations, make: Parameters, name: str, inputs: Number, bias: bool, leaves: bool = True
    ):
        self.t, self.sizes = t, make.sizes
        self.weight = make(f"{name}.weight", inputs * self.sizes.spec.dim)
        self.bias = make.maybe(bias, f"{name}.bias", self.sizes.spec.dim)
        self.stream = Stream(t, self.sizes) if self.sizes.several_tp and leaves else None

    def __call__(self, x: Tensor) -> Tensor:
        t, whole = self.t, self.sizes.whole
        if self.stream is None:
            return t.linear(x, self.weight, whole, self.bias)
        turned = self.stream.turned_gradient
        left = self.stream.leave(t.linear(x, self.weight, whole, turned_gradient=turned))
        return left if self.bias is None else t.add_repeated(left, self.bias)
