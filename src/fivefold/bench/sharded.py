"""What FSDP costs beyond its messages, on ranks whose device is the host itself.

There the work around a message (hooks, copies into and out of its buffer) takes the device's time, and ranks
that share cores wait for each other's turn at every message. So the same layers run forward and backward
twice, with their weights sharded and without, and the difference is told for each message.
"""

import statistics
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fivefold.bench.compute import Agree
from fivefold.bench.messages import Seconds
from fivefold.bench.timing import seconds_of
from fivefold.comm.world import World

LAYERS, WIDTH, TOKENS = 6, 256, 1024
ROUNDS = 7
GATHERED = WIDTH * (WIDTH + 1) * 4
"""Bytes of a layer's message: its weight and bias."""


def measure_sharded(world: World, agree: Agree, messages: Seconds) -> float:
    """Seconds that a message of FSDP takes longer than `messages` has it; never less than none."""
    plain, sharded = _layers(world, sharded=False), _layers(world, sharded=True)
    took: dict[Callable[[], None], list[float]] = {plain: [], sharded: []}
    for _ in range(ROUNDS):
        for call, found in took.items():
            agree(0.0)
            found.append(seconds_of(call, world.device, 1))
    medians = {call: statistics.median(found[1:]) for call, found in took.items()}
    sent = sum(_looked_up(messages[operation][world.size]) for operation in ("all_gather", "reduce_scatter"))
    return max(0.0, (medians[sharded] - medians[plain]) / LAYERS - sent) / 2


def _layers(world: World, sharded: bool) -> Callable[[], None]:
    """A call that goes forward and backward: each layer sends one gather and one reduction."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(world.device)
    if sharded:
        mesh = init_device_mesh(world.device.type, (world.size,))
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    x = torch.randn(TOKENS, WIDTH, device=world.device, requires_grad=True)

    def there_and_back() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return there_and_back


def _looked_up(sizes: dict[int, float]) -> float:
    """Seconds of the measured size that is nearest to a layer's."""
    return sizes[min(sizes, key=lambda size: abs(size - GATHERED))]
