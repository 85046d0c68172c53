"""One rank of a job, run for real on a process group that sends nothing, and watched tensor by tensor."""

from __future__ import annotations

import gc
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fivefold.axes.layout import Layout
from fivefold.axes.runtime import expert_split
from fivefold.comm.collectives import exchanged
from fivefold.config import Job
from fivefold.data.batch import Batch
from fivefold.ledger.setup import Setup
from fivefold.operators import inside
from fivefold.training.build import Built, build
from fivefold.training.norm import clipping
from fivefold.training.stopping import let_through

ATTENTION = "_scaled_dot_product"


class Watch(TorchDispatchMode):
    """Follows every storage from the first operation that names it to its end, and counts FLOPs.

    FSDP changes sizes in place, and frees so what no operation names: `known` are those that were seen last,
    and their sum may be too large. Where it is above the peak, all are read anew.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.known: dict[int, int] = {}
        self.at_most = 0
        self.peak = 0
        self.flops = 0

    def see(self, *tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = _storage(tensor)
                key = storage._cdata
                if key not in self.storages:
                    self.storages[key] = weakref.ref(storage, partial(self._forget, key))
                self._has(key, storage.nbytes())

    def _has(self, key: int, size: int) -> None:
        self.at_most += size - self.known.get(key, 0)
        self.known[key] = size

    def _forget(self, key: int, _: Any) -> None:
        self.storages.pop(key, None)
        self.at_most -= self.known.pop(key, 0)

    @property
    def now(self) -> int:
        for key, reference in list(self.storages.items()):
            if (storage := reference()) is not None:
                self._has(key, storage.nbytes())
        return self.at_most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = inside(func)
        if plain is not None:
            with self:
                return plain(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.see(*tree_leaves((args, kwargs, result)))
        if self.at_most > self.peak:
            self.peak = max(self.peak, self.now)
        self.flops += flops_of(func, args, result)
        return result


def flops_of(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """As torch's counter has it, which does not know the CPU's attention, nor (2.11) fewer key heads."""
    packet = func._overloadpacket
    if packet.__name__.startswith(ATTENTION):
        back = packet.__name__.endswith("backward")
        query, key, value = args[1:4] if back else args[:3]
        shapes = [(*x.shape[:1], query.shape[1], *x.shape[2:]) for x in (query, key, value)]
        return int(sdpa_backward_flop_count(shapes[0], *shapes) if back else sdpa_flop_count(*shapes))
    if packet not in flop_registry or packet.__name__.startswith("_flash_attention"):  # 2.11: likewise
        return 0
    return int(flop_registry[packet](*args, out_val=result))


@dataclass(frozen=True)
class Traced:
    """Bytes of one rank, and FLOPs of a step.

    saved  what the first forward pass leaves behind, without a pipeline; gathered weights are not counted
    kept   of this, what autograd says that it keeps
    first  the most alive in that pass
    """

    rest: int
    saved: int
    kept: int
    first: int
    peak: int
    flops: int


def traced(job: Job, rank: int = 0, documents: int = 1) -> Traced:
    """The second step of a rank of the job. Batches are not counted: they are the loader's.

    documents  in a sequence
    """
    with traces({"": (job, rank)}, documents) as found:
        return found("")


@contextmanager
def traces(cases: Mapping[str, tuple[Job, int]], documents: int = 1) -> Iterator[Callable[[str], Traced]]:
    """As `traced`, of jobs and ranks by name, as many at a time as there are cores; waits for what is asked.

    Each in a process of its own: torch remembers the groups of an earlier world.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.traced"])
    # The server may be that of ranks, which holds signals back: a pool ends its processes by one.
    several = min(len(cases), os.cpu_count() or 1)
    with context.Pool(several, initializer=let_through, maxtasksperchild=1) as pool:
        under_way = {
            name: pool.apply_async(traced_here, (job, rank, "cpu", documents))
            for name, (job, rank) in cases.items()
        }
        yield lambda name: under_way[name].get()


def traced_here(job: Job, rank: int = 0, device: str = "cpu", documents: int = 1) -> Traced:
    """As `traced`, in this process, which must not have seen another world; perhaps on a GPU."""
    torch.set_num_threads(1)
    with fake_world(Layout.of(job).ranks, rank), _even_exchange():
        built = build(job, torch.device(device))
        _step(built, _batches(built, documents))
        gc.collect()
        watch = Watch()
        watch.see(*_at_rest(built))
        rest = watch.now
        batches = _batches(built, documents)
        watch.see(*(tensor for batch in batches for tensor in (batch.tokens, batch.targets)))
        given = watch.now - rest
        with watch:
            _step(built, batches)
        return Traced(rest, *_saved(built), watch.peak - given, watch.flops)


def _at_rest(built: Built) -> Iterator[Any]:
    yield from built.weights.parameters
    yield from built.weights.masters
    yield from built.optimizer.tensors()
    for part in built.parts:
        yield from part.buffers()
    if built.step.pipeline is not None:
        for stage in built.step.pipeline.stages:
            for received in (stage.args_recv_info, stage.grad_recv_info):
                for infos in received.values():
                    yield from (getattr(info, "buffer", None) for info in infos)


def _batches(built: Built, documents: int = 1) -> list[Batch]:
    training = built.job.training
    assert training.micro_batch is not None
    shape = training.micro_batch, training.seq_len
    device = built.step.device

    def zeros() -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    numbers = (torch.arange(shape[1], device=device) * documents // shape[1]).expand(shape)
    apart = numbers.contiguous() if documents > 1 else None
    return [Batch(zeros(), zeros(), apart, shape[1]) for _ in range(int(Setup.of(built.job).micro_batches))]


def one_backward(built: Built) -> None:
    """The forward and backward passes of a step, on batches of zeros; their gradients are let go."""
    batches = _batches(built)
    built.step.backward(batches, built.step.count_tokens(batches))
    built.weights.clear_gradients()


def _step(built: Built, batches: list[Batch]) -> None:
    """As `Step.__call__`, whatever the numbers are: what never arrived is not finite."""
    step = built.step
    loss = step.backward(batches, step.count_tokens(batches))
    gradients = step.collect()
    _, norm = step.totals(loss, gradients)
    built.optimizer.step(1e-4, clipping(norm, 1.0))
    built.weights.clear_gradients()


def _saved(built: Built) -> tuple[int, int, int]:
    """Of one forward pass: `saved`, `kept` and `first` of `Traced`."""
    if built.step.pipeline is not None:
        return 0, 0, 0
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        kept[storage._cdata] = storage.nbytes()
        return tensor

    batch, watch = _batches(built)[0], Watch()
    watch.see(*_at_rest(built), batch.tokens, batch.targets)
    before, given = watch.now, batch.tokens.nbytes + batch.targets.nbytes
    with watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = built.parts[0](**built.step.inputs(batch))
    weights = {_storage(weight) for weight in built.parts[0].parameters()}
    resting = {_storage(tensor)._cdata for tensor in _at_rest(built) if isinstance(tensor, torch.Tensor)}
    gathered = sum(storage.nbytes() for storage in weights if storage._cdata not in resting)
    for storage in (*weights, _storage(batch.tokens), _storage(batch.targets)):
        kept.pop(storage._cdata, None)
    return watch.now - before - gathered - loss.nbytes, sum(kept.values()), watch.peak - given


def _storage(tensor: torch.Tensor) -> Any:
    own = getattr(tensor, "_local_tensor", tensor)
    return getattr(own, "numbers", own).untyped_storage()  # of a weight that was gathered in 8 bits


@contextmanager
def fake_world(ranks: int, rank: int) -> Iterator[None]:
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _even_exchange() -> Iterator[None]:
    """Nobody says how many tokens come: as many as go, which is so under balanced routing."""

    def echoed(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return exchanged(x, *args).copy_(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_split, "exchanged", echoed)
        yield
