"""What a measured call is said to do is what it does: counted by torch while it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import fivefold.bench.compute as compute
from fivefold.hardware.cluster import TALL

CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> compute._Bench:
    """With sizes that take no time."""
    monkeypatch.setattr(compute, "SIDES", {"cpu": (8, 16, 32)})
    monkeypatch.setattr(compute, "HEADS", {"cpu": (2, 16, 8)})
    monkeypatch.setattr(compute, "LARGE", {"cpu": 2**14})
    return compute._Bench(CPU, lambda value: value)


class Seen(TorchDispatchMode):
    """The operators that run, and the bytes of the tensors that they are given and give."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
        self.operators.append(func.overloadpacket.__name__)
        self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        return out


def flops_of(figure: compute._Figure) -> float:
    call = figure.prepared()
    with FlopCounterMode(display=False) as counted:
        call()
    return float(counted.get_total_flops())


@pytest.mark.parametrize("times", [1, TALL])
def test_products_are_counted(bench: compute._Bench, times: int) -> None:
    for figure in bench.products(torch.float32, times):
        assert figure.amount == flops_of(figure)


def test_causal_attention_is_counted_as_half_the_square(bench: compute._Bench) -> None:
    """torch counts it where it is made of products: 2 forward and 4 backward, each over the whole square.
    A kernel that keeps no scores forms them once more in backward."""
    figure = bench.attention(torch.float32)
    with sdpa_kernel(SDPBackend.MATH):
        assert figure.amount == flops_of(figure) / 6 * 7 / 2


def test_every_byte_that_a_sum_reads_and_writes_is_counted(bench: compute._Bench) -> None:
    figure = bench.memory()
    call = figure.prepared()
    with Seen() as seen:
        call()
    assert figure.amount == seen.bytes


def test_every_product_of_the_tiny_layers_is_counted(bench: compute._Bench) -> None:
    figure = bench.launch()
    call = figure.prepared()
    with Seen() as seen:
        call()
    products = [name for name in seen.operators if name in ("mm", "bmm", "addmm", "linear")]
    # Nobody asks for the gradient of the first layer's input.
    assert figure.amount == len(products) + 1
