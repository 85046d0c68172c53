"""The tracer sees every collective: its operation, the whole tensor's bytes, its group, and how often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.axes.layout import Layout
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm import collectives
from fivefold.comm.world import World
from tests.ranks import on_ranks
from tests.tracer import MessageTracer, Seen


def say_everything(world: World) -> dict[str, Any]:
    """One of each, of known size, among all ranks or along an axis."""
    mesh = Mesh(Layout(dp_replicate=2, dp_shard=2, zero=3), world.device)
    shards, replicas = mesh.group("dp_shard"), mesh.group("dp_replicate")
    tensor = torch.arange(6, dtype=torch.float32) + world.rank
    whole = torch.zeros(12)
    with MessageTracer(mesh) as tracer:
        dist.all_reduce(tensor.clone())
        dist.all_reduce(tensor.double(), group=replicas)
        dist.all_gather_into_tensor(whole, tensor, group=shards)
        dist.all_gather([torch.zeros(6), torch.zeros(6)], tensor, group=shards)
        reduced = torch.zeros(6)
        dist.reduce_scatter_tensor(reduced, whole.clone(), group=shards)
        dist.broadcast(tensor.clone(), src=0)
        work = dist.all_reduce(tensor.bfloat16(), group=replicas, async_op=True)
        assert work is not None
        work.wait()
        nothing = tensor * 2
    dist.all_reduce(tensor.clone())  # no longer watched
    return {"seen": tracer.seen, "traffic": tracer.traffic(), "whole": whole, "unseen": nothing.numel()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(say_everything, 4)


def test_every_collective_is_written_down(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["seen"] == [
            Seen("all_reduce", 24, "dp_replicate*dp_shard"),
            Seen("all_reduce", 48, "dp_replicate"),
            Seen("all_gather", 48, "dp_shard"),
            Seen("all_gather", 48, "dp_shard"),
            Seen("reduce_scatter", 48, "dp_shard"),
            Seen("broadcast", 24, "dp_replicate*dp_shard"),
            Seen("all_reduce", 12, "dp_replicate"),
        ]


def test_traffic_counts_equal_messages(found: list[dict[str, Any]]) -> None:
    assert found[0]["traffic"] == Counter(
        {
            ("all_gather", 48, "dp_shard"): 2,
            ("all_reduce", 24, "dp_replicate*dp_shard"): 1,
            ("all_reduce", 48, "dp_replicate"): 1,
            ("reduce_scatter", 48, "dp_shard"): 1,
            ("broadcast", 24, "dp_replicate*dp_shard"): 1,
            ("all_reduce", 12, "dp_replicate"): 1,
        }
    )


def test_what_is_sent_is_not_changed(found: list[dict[str, Any]]) -> None:
    base = torch.arange(6, dtype=torch.float32)
    assert torch.equal(found[3]["whole"], torch.cat([base + 2, base + 3]))


def gathers_and_scatters(world: World, narrow: bool) -> list[Seen]:
    """Both of our own collectives over gloo; `narrow`: they send 16 bits of every 32."""
    mesh = Mesh(Layout(tp=2), world.device)
    group, exchange = mesh.group("tp"), collectives._exchange
    if narrow:
        collectives._exchange = lambda x, *args: exchange(x.bfloat16(), *args).to(x.dtype)
    try:
        tracer = MessageTracer(mesh)
        with tracer:
            collectives.gathered(torch.ones(6), group)
            collectives.scattered(torch.ones(6), group)
    finally:
        collectives._exchange = exchange
    return tracer.seen


def test_what_is_counted_is_what_was_sent_and_not_what_was_declared() -> None:
    for narrow, each in ((False, 4), (True, 2)):
        expected = [Seen("all_gather", 12 * each, "tp"), Seen("reduce_scatter", 6 * each, "tp")]
        assert on_ranks(gathers_and_scatters, 2, narrow) == [expected] * 2
