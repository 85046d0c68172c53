"""What a block's operations cost beyond the least when they are run one by one: counted in a replay.

`work.py` lists what has to be done: a norm reads its input and writes its output. Run eagerly, a norm or a
rotation is several kernels, each of which reads and writes tensors of its own.
"""

from dataclasses import dataclass
from functools import cache

from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Number, Setup
from fivefold.ledger.work import Work, block_work
from fivefold.models.spec import ModelSpec
from fivefold.replay.graph import INPUT, Tensor
from fivefold.replay.operations import Operations
from fivefold.replay.program import block, rotary_tables
from fivefold.replay.sizes import Sizes

TOKENS = 4096
READS = 1.5
"""Bytes that a kernel reads for each that it writes: some take one tensor, some two."""


@dataclass(frozen=True)
class Eager:
    """Of a block's operations bound by memory, on average over forward and backward.

    kernels  started for each operation that `block_work` lists
    traffic  bytes moved for each that it lists
    """

    kernels: float
    traffic: float


@cache
def eager(spec: ModelSpec, device: str) -> Eager:
    """A block replayed on a device's kernels; every tensor that is made is a kernel's.

    Products and attention are one kernel each, and what they make is left out.
    """
    spec = spec.model_copy(update={"attention_softcap": None})  # whose scores `block_work` counts
    setup = Setup(spec, seq_len=TOKENS, global_batch=1, precision=precision_named("fp32"))
    t, sizes = _Counting(device), Sizes(setup)
    rope = rotary_tables(t, sizes)
    x = t.empty(sizes.stream, sizes.width)
    x.edge = INPUT
    t.kernels, t.written = 0, 0
    t.backward(block(t, sizes, x, rope))
    work = block_work(setup)
    listed = [item for item in work if item.kind == "memory"]
    others = [item for item in work if item.kind != "memory"]
    written = t.written - sum(_written(item, sizes.width) for item in others)
    moved = sum(float(item.moved) for item in listed)
    return Eager((t.kernels - len(others)) / len(listed), (1 + READS) * written / moved)


def _written(item: Work, width: int) -> float:
    """Bytes that a product or attention makes."""
    if item.kind == "matmul":
        return float(1.0 * item.batch * item.rows * item.columns * width)
    queries = float(1.0 * item.batch * item.rows * item.inner * width)
    # Forward reads queries, keys and values and writes as many bytes as the queries have; backward moves
    # twice as much, and writes the gradients of all three.
    return queries if item.phase == "forward" else float(item.moved) / 2 - queries


class _Counting(Operations):
    """Counts the tensors that are made."""

    kernels = 0
    written: float = 0.0

    def empty(self, elements: Number, width: int) -> Tensor:
        self.kernels += 1
        self.written += float(elements) * width
        return super().empty(elements, width)
