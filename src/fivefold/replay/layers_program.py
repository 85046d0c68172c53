"""Layers that several parts of the model are made of, on tensors that have only a size: see `program`."""

from collections.abc import Callable

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Tensor
from fivefold.replay.operations import WIDE, Operations
from fivefold.replay.shared_program import Stream
from fivefold.replay.sizes import Sizes

Layer = Callable[..., Tensor]
Rope = tuple[Tensor, Tensor]
"""Cosines and sines that rotate queries and keys."""


def rotary_tables(t: Operations, sizes: Sizes) -> Rope | None:
    """What all blocks of a stage share."""
    if sizes.spec.positions != "rope":
        return None
    angles = t.empty(sizes.table, WIDE)
    cos, sin = t.empty(sizes.table, sizes.wide), t.empty(sizes.table, sizes.wide)
    del angles
    return cos, sin


class Parameters:
    """Makes the parameters of one part, of the compute dtype.

    stream  how tp ranks hold the residual stream, where there are several
    """

    def __init__(self, t: Operations, sizes: Sizes):
        self.t, self.sizes = t, sizes
        self.stream = Stream(t, sizes) if sizes.several_tp else None

    def __call__(self, elements: Number) -> Tensor:
        return self.t.parameter(elements, self.sizes.width)

    def maybe(self, wanted: bool, elements: Number) -> Tensor | None:
        return self(elements) if wanted else None


class Norm:
    """Over rows of `length` elements."""

    def __init__(self, make: Parameters, length: int, rms: bool, bias: bool):
        self.t, self.length, self.rms = make.t, length, rms
        self.parameters = [make(length) for _ in range(1 + bias)]

    def __call__(self, x: Tensor) -> Tensor:
        return self.t.norm(x, self.parameters, x.elements // self.length, self.rms)


def stream_norm(make: Parameters) -> Layer:
    """A norm of the residual stream; under tp its result enters a layer that the ranks compute together."""
    spec, stream = make.sizes.spec, make.stream
    rms = spec.norm == "rmsnorm"
    norm = Norm(make, spec.dim, rms, not rms and spec.norm_bias)
    return norm if stream is None else lambda x: stream.enter(norm(x))


class Column:
    """A linear layer of which each tp rank computes some outputs.

    used  where every rank holds the whole matrix: how many outputs of it this rank computes
    """

    def __init__(self, make: Parameters, outputs: Number, bias: bool, used: Number | None = None):
        self.t, self.sizes, self.outputs, self.used = make.t, make.sizes, outputs, used
        self.weight = make(outputs * self.sizes.spec.dim)
        self.bias = make.maybe(bias, outputs)

    def __call__(self, x: Tensor) -> Tensor:
        t, sizes, used = self.t, self.sizes, self.used
        if used is None:
            return t.linear(x, self.weight, sizes.tokens * self.outputs, self.bias)
        weight = t.rows_of(self.weight, used * sizes.spec.dim)
        bias = None if self.bias is None else t.rows_of(self.bias, used)
        return t.linear(x, weight, sizes.tokens * used, bias)


class Row:
    """A linear layer whose result goes to the stream; under tp each rank has some of its inputs."""

    def __init__(self, make: Parameters, inputs: Number, bias: bool, leaves: bool = True):
        self.t, self.sizes = make.t, make.sizes
        self.weight = make(inputs * self.sizes.spec.dim)
        self.bias = make.maybe(bias, self.sizes.spec.dim)
        self.stream = make.stream if leaves else None

    def __call__(self, x: Tensor) -> Tensor:
        t, whole = self.t, self.sizes.whole
        if self.stream is None:
            return t.linear(x, self.weight, whole, self.bias)
        turned = self.stream.turned_gradient
        left = self.stream.leave(t.linear(x, self.weight, whole, turned_gradient=turned))
        return left if self.bias is None else t.add_repeated(left, self.bias)


class Mlp:
    """Under tp, `leaves` says whether its result goes to the stream, or is summed later."""

    def __init__(self, make: Parameters, ffn: int, leaves: bool = True):
        spec, width = make.sizes.spec, ffn // make.sizes.tp
        self.t = make.t
        self.gate: Layer | None = Column(make, width, spec.mlp_bias) if spec.gated else None
        self.up: Layer = Column(make, width, spec.mlp_bias)
        self.down: Layer = Row(make, width, spec.mlp_bias, leaves)

    def __call__(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            hidden = self.t.multiply(self.t.unary(self.gate(x)), self.up(x))
        else:
            hidden = self.t.unary(self.up(x))
        return self.down(hidden)
