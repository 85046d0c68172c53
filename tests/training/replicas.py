"""Replicas that train alone, live and by a plain program: for tests of outer steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fivefold.axes.layout import Layout
from fivefold.axes.outer import fragment_of, replica_of
from fivefold.axes.runtime.data_split import local_slab
from fivefold.comm.world import World
from fivefold.config import Job, LayoutSection, resolve
from fivefold.data.corpus import Corpus, open_corpus
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, load_latest
from fivefold.training.learning_rate import learning_rate
from fivefold.training.step import StepResult
from tests.cases import batches, built_on_cpu, save

Whole = dict[str, Tensor]


@dataclass(frozen=True)
class Mine:
    """What one rank has: of each parameter its first element in the whole, and values by kind."""

    replica: int
    shapes: dict[str, tuple[int, ...]]
    offsets: dict[str, tuple[int, ...]]
    values: dict[str, dict[str, Tensor]]
    results: list[StepResult]


def advanced(job: Job, built: Built, start: int, end: int) -> list[StepResult]:
    found = []
    with batches(job, built, start) as loader:
        for step in range(start + 1, end + 1):
            lr = learning_rate(job.optimizer, step, job.training.steps)
            found.append(built.step(next(loader), lr, step))
    return found


def mine(built: Built, results: list[StepResult]) -> Mine:
    weights, outer = built.weights, built.outer
    values: dict[str, dict[str, Tensor]] = {
        "weights": _by_name(built, [master.detach() for master in weights.masters])
    }
    for index, name in enumerate(weights.names):
        for number, tensor in enumerate(built.optimizer.tensors_of(index)):
            values.setdefault(f"optimizer {number}", {})[name] = tensor.clone()
    if outer is not None:
        values["anchors"] = _by_name(built, outer.anchors)
        if outer.momenta is not None:
            values["momenta"] = _by_name(built, outer.momenta)
        for flight in outer.flights:
            for index, average, before in zip(flight.indices, flight.averages(), flight.before, strict=True):
                values.setdefault(f"arriving {flight.started}", {})[weights.names[index]] = average.clone()
                values.setdefault(f"started {flight.started}", {})[weights.names[index]] = before.clone()
    for part in built.parts:
        values.setdefault("buffers", {}).update({n: b.clone() for n, b in part.named_buffers()})
    slabs = {n: local_slab(p) for n, p in zip(weights.names, weights.parameters, strict=True)}
    shapes = {n: tuple(p.shape) for n, p in zip(weights.names, weights.parameters, strict=True)}
    offsets = {name: offset for name, (offset, _) in slabs.items()}
    return Mine(built.mesh.place.dp_replicate, shapes, offsets, values, results)


def _by_name(built: Built, tensors: list[Tensor]) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in zip(built.weights.names, tensors, strict=True)}


def trained(world: World, jobs: dict[str, Job], steps: int | None = None) -> dict[str, Mine]:
    """Where this rank is with each job, in the end or after some steps."""
    found = {}
    for name, job in jobs.items():
        built = built_on_cpu(job)
        found[name] = mine(built, advanced(job, built, 0, steps or job.training.steps))
    return found


def saved_half_way(world: World, jobs: dict[str, Job], step: int, folder: Path) -> dict[str, Mine]:
    """As `trained`, saved after this step on the way."""
    found = {}
    for name, job in jobs.items():
        built = built_on_cpu(job)
        first = advanced(job, built, 0, step)
        scale = built.step.scale
        progress = Progress(step, step, *((scale.value, scale.good_steps) if scale else ()))
        save(built, folder / name, progress)
        found[name] = mine(built, first + advanced(job, built, step, job.training.steps))
    return found


def resumed(world: World, jobs: dict[str, Job], folder: Path) -> dict[str, Mine]:
    """Each job from the checkpoint of the same name (before an arrow) to its end."""
    found = {}
    for name, job in jobs.items():
        built = built_on_cpu(job)
        progress, damaged = load_latest(built, folder / name.partition(" -> ")[0])
        assert progress is not None
        assert not damaged
        found[name] = mine(built, advanced(job, built, progress.step, job.training.steps))
    return found


def whole(ranks: list[Mine], kind: str) -> list[Whole]:
    """By replica, the whole tensors of a kind put together from its ranks."""
    found: dict[int, Whole] = defaultdict(dict)
    for rank in ranks:
        for name, value in rank.values[kind].items():
            shape = rank.shapes[name]
            target = found[rank.replica].setdefault(name, torch.full(shape, torch.nan, dtype=value.dtype))
            slab = tuple(slice(o, o + n) for o, n in zip(rank.offsets[name], value.shape, strict=True))
            target[slab] = value
    return [found[replica] for replica in sorted(found)]


def corpus_for(job: Job, document_length: int | None = 7) -> Corpus:
    """As `tests.cases.batches` has it; without a length all sequences have as many tokens that count."""
    return open_corpus(
        "random",
        tokenizer="bytes",
        seq_len=job.training.seq_len,
        seed=job.training.seed,
        vocab_size=job.spec.vocab_size,
        document_length=document_length,
    )


# --- the same by a plain program ---------------------------------------------------------------------------


@dataclass
class Reference:
    """Replicas in one process; averages are sums over a list."""

    job: Job
    replicas: list[Built]
    anchors: Whole
    momenta: Whole
    waiting: list[tuple[int, Whole, list[Whole]]]  # due after which step, averages, weights at the start
    short: bool = False  # the run ends: what comes is of less than a round

    @classmethod
    def of(cls, job: Job) -> Reference:
        alone = replica_of(job)
        micro = alone.training.global_batch // _micro_batches(job)
        training = alone.training.model_copy(update={"micro_batch": micro})
        plain = resolve(alone.model_copy(update={"layout": LayoutSection(), "training": training}), 1)
        built = [build(plain, torch.device("cpu")) for _ in range(Layout.of(job).dp_replicate)]
        first = _weights(built[0])
        return cls(job, built, first, {name: torch.zeros_like(w) for name, w in first.items()}, [])

    def train(self, until: int | None = None) -> None:
        job, count = self.job, len(self.replicas)
        corpus = corpus_for(job)
        loaders = [
            corpus.train_loader(
                job.training.global_batch, replica.step.micro_batch, rank=rank, ranks=count, shares=count
            )
            for rank, replica in enumerate(self.replicas)
        ]
        for step in range(1, (until or job.training.steps) + 1):
            lr = learning_rate(job.optimizer, step, job.training.steps)
            for loader, replica in zip(loaders, self.replicas, strict=True):
                replica.step(next(loader), lr, step)
            self.outer(step)
        for loader in loaders:
            loader.close()

    def outer(self, step: int) -> None:
        settings, last = self.job.communication, self.job.training.steps
        rounds, fragments = settings.local_steps, settings.fragments or 1
        self.apply(step)
        for fragment in range(fragments):
            if step % rounds == fragment * (rounds // fragments):
                self.start(step, fragment)
        self.apply(step)
        for fragment in range(1, fragments if step == last else 0):
            self.short = True
            self.start(step, fragment)
        self.apply(step)

    def start(self, step: int, fragment: int) -> None:
        where = fragment_of(self.job.spec, self.job.communication.fragments or 1)
        names = [name for name in self.anchors if where[name] == fragment]
        now = [{name: _weights(replica)[name] for name in names} for replica in self.replicas]
        averages = {}
        for name in names:
            origins = [self.anchors[name]] * len(now)
            for _, _, before in self.waiting:
                if name in before[0]:
                    origins = [weights[name] for weights in before]
            differences = [origin - weights[name] for origin, weights in zip(origins, now, strict=True)]
            averages[name] = torch.stack(differences).mean(0)
        due = min(step + (self.job.communication.outer_delay or 0), self.job.training.steps)
        self.waiting.append((due, averages, now))

    @torch.no_grad()
    def apply(self, step: int) -> None:
        settings = self.job.communication
        while self.waiting and self.waiting[0][0] <= step:
            _, averages, before = self.waiting.pop(0)
            for name, average in averages.items():
                momentum = settings.outer_momentum or 0.0
                if not self.short:
                    self.momenta[name] = momentum * self.momenta[name] + average
                nesterov = average + momentum * self.momenta[name]
                moved = average if self.short else (settings.outer_lr or 0.0) * nesterov
                self.anchors[name] = self.anchors[name] - moved
                for replica, weights in zip(self.replicas, before, strict=True):
                    master = dict(zip(replica.weights.names, replica.weights.masters, strict=True))[name]
                    moved = self.anchors[name] + (master - weights[name])
                    mix = (settings.outer_mix or 0.0) if step < self.job.training.steps else 0.0
                    master.copy_(mix * master + (1 - mix) * moved)
                for _, _, later in self.waiting:
                    for ours, theirs in zip(before, later, strict=True):
                        if name in theirs:
                            theirs[name] = self.anchors[name] + (theirs[name] - ours[name])
            for replica in self.replicas:
                replica.weights.publish()

    @property
    def weights(self) -> list[Whole]:
        return [_weights(replica) for replica in self.replicas]


def _weights(built: Built) -> Whole:
    return _by_name(built, [master.detach() for master in built.weights.masters])


def _micro_batches(job: Job) -> int:
    assert job.training.micro_batch is not None
    return job.training.global_batch // (job.training.micro_batch * Layout.of(job).data_ranks)


def assert_close(found: list[Whole], expected: list[Whole], bound: float) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            # What moves by rounding alone (the bias of keys has no gradient) is held to it absolutely.
            error = (ours[name] - theirs[name]).norm() / (theirs[name].norm() + 1)
            assert error <= bound, (name, error)
