"""Blocks with layers in 8 bits, compiled into one graph: the same bits, and each cast once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import (  # type: ignore[import-untyped]
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch._dynamo.backends.common import aot_autograd

from fivefold.axes.runtime.fp8_split import products
from fivefold.comm.world import World
from fivefold.config import Job
from tests.axes.test_fp8_split import WIDE, case
from tests.cases import batches, built_on_cpu
from tests.ranks import on_ranks

SMALL = WIDE | {"layers": 2}


def compiled(job: Job) -> tuple[Any, list[Counter[str]]]:
    """A model whose blocks are compiled; what their graphs compute, forward and backward."""
    built, graphs = built_on_cpu(job), list[Counter[str]]()

    def counting(graph: Any, inputs: Any) -> Any:
        called = (node.target for node in graph.graph.nodes if node.op == "call_function")
        graphs.append(Counter(str(target).split(".")[1] for target in called if "." in str(target)))
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=counting, bw_compiler=counting, partition_fn=partition)
    for block in built.parts[0].blocks.values():
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)  # type: ignore[method-assign]
    return built, graphs


def one_step(job: Job, built: Any) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradients of a step's micro-batches."""
    with batches(job, built) as loader:
        first = next(iter(loader))
        loss = built.step.backward(first, built.step.count_tokens(first))
    return float(loss), [gradient.clone() for gradient in built.step.collect()]


def both_ways(world: World, job: Job) -> list[Counter[str]]:
    torch._dynamo.reset()
    built, graphs = compiled(job)
    loss, gradients = one_step(job, built)
    usual = built_on_cpu(job)
    expected, theirs = one_step(job, usual)
    assert loss == expected
    for name, one, other in zip(built.weights.names, gradients, theirs, strict=True):
        assert torch.equal(one, other), name
    torch._dynamo.reset()
    return graphs


QUICK = {("tensorwise", 1, "none"), ("tensorwise", 1, "selective"), ("rowwise", 2, "selective")}
CASES = {
    f"{scales}, tp {ranks}, {recompute}": pytest.param(
        scales, ranks, recompute, marks=[] if quick else pytest.mark.slow
    )
    for scales in ("tensorwise", "rowwise")
    for ranks in (1, 2)
    for recompute in ("none", "selective", "full")
    for quick in [(scales, ranks, recompute) in QUICK]
}


@pytest.mark.parametrize(("scales", "ranks", "recompute"), CASES.values(), ids=CASES)
def test_one_graph_computes_the_same_bits(scales: str, ranks: int, recompute: str) -> None:
    training = {"fp8": scales, "recompute": recompute, "global_batch": 4}
    job = case("compiled", ranks, {"tp": ranks}, training, SMALL).job()
    graphs = on_ranks(both_ways, ranks, job)[0]
    assert recompute == "selective" or len(graphs) == 2, "blocks share one graph, forward and backward"
    forward, backward = graphs[0], graphs[-1]
    assert forward["cast_both"] == 4, "query, key and value share their input's cast; gate and up do"
    assert forward["cast_rows"] == forward["scaled_product"] == 7
    assert forward["cast_columns"] == 0, "weights are cast for backward in forward, and kept until then"
    assert backward["cast_columns"] == 7
    # Selective recomputation casts inputs again, and multiplies nothing again.
    assert backward["cast_both"] == 7 + 4 * (recompute == "selective")
    assert backward["scaled_product"] == 14


def spoilt(world: World, job: Job) -> list[tuple[str, list[bool]]]:
    built, _ = compiled(job)
    up = built.parts[0].get_parameter("blocks.1.mlp.up.weight")
    with torch.no_grad():
        up[0, 0] = torch.nan
    one_step(job, built)
    torch._dynamo.reset()
    return [(product.name, product.spoilt.tolist()) for product in products(built.parts)]


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "selective"])
def test_compiled_products_say_what_was_not_finite(recompute: str) -> None:
    job = case("spoilt", 1, {}, {"fp8": "rowwise", "recompute": recompute, "global_batch": 2}, SMALL).job()
    (found,) = on_ranks(spoilt, 1, job)
    names = [name for name, _ in found]
    first = names.index("blocks.1.mlp.up")
    assert not any(any(what) for _, what in found[:first])
    assert found[first][1] == [True, False]
    assert found[first + 1] == ("blocks.1.mlp.down", [False, True])
