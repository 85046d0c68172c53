"""What a checkpoint has of replicas that train alone, by name.

    model.X, optimizer.X.KIND, ...  of replica 0, as in any checkpoint: whoever reads one finds a model there
    started.X.T                     its weights after step T, when an average was started that is on its way
    lost.X.T                        what compression has left out of its part in that average
    replica.R.model.X, ...          the same of the other replicas, with their loss scale
    outer.X.anchor, .momentum       the outer weights and their momentum, alike on all replicas
    outer.X.arriving.T              the average that was started after step T: it was waited for

Averages carry their number, and what they are of, with them: a run may go on with other settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fivefold.config import Job
from fivefold.storage.folder import newest_first
from fivefold.storage.manifest import DamagedError, read_manifest
from fivefold.training.flight import Flight
from fivefold.training.loss_scale import LossScale
from fivefold.training.outer_step import OuterStep

State = dict[str, Any]
Names = Mapping[str, Any]
"""The tensors of a checkpoint, by name."""


def replicas_in(names: Names) -> int:
    """How many replicas a checkpoint has."""
    return 1 + max((int(name.split(".")[1]) for name in names if name.startswith("replica.")), default=0)


def has_outer(names: Names) -> bool:
    """Whether it is of a run with outer steps."""
    return any(name.startswith("outer.") for name in names)


def to_save(own: State, outer: OuterStep, replica: int, scale: LossScale | None) -> State:
    """What a rank saves: its replica's `own` state under the replica's name, and what all have alike.

    Averages on their way are waited for.
    """
    shared = _outer(outer, with_momentum=True)
    own = {**own, **_on_their_way(outer, shared)}
    if replica and scale is not None:
        own["scale"] = scale_tensors(scale)
    return {**_of_replica(own, replica), "outer": shared}


def to_load(own: State, outer: OuterStep, replica: int, names: Names) -> State:
    """What a rank of a run with outer steps loads from a checkpoint with tensors of these names.

    Replica r goes on as the saved one of number r modulo their count.
    """
    source = replica % replicas_in(names)
    if not has_outer(names):
        return own
    outer.flights = list(_arriving(outer, names))
    shared = _outer(outer, with_momentum=any(name.endswith(".momentum") for name in names if _is_outer(name)))
    own = {**own, **_on_their_way(outer, shared)}
    if f"replica.{source}.scale.value" in names:
        own["scale"] = scale_tensors(LossScale(1.0))
    return {**_of_replica(own, source), "outer": shared}


def without_replicas(own: State) -> State:
    """What a run without outer steps loads of one with them: the outer weights, and replica 0's states."""
    anchors = {name: {"anchor": tensor} for name, tensor in own["model"].items()}
    return {**{kind: values for kind, values in own.items() if kind != "model"}, "outer": anchors}


def left_out(name: str, job: Job, names: Names) -> bool:
    """Whether a job has no use for a tensor of a checkpoint."""
    if not job.communication.takes_outer_steps:
        of_replica = name.startswith(("replica.", "started.", "lost.")) or (
            has_outer(names) and name.startswith("model.")
        )
        return of_replica or (_is_outer(name) and not name.endswith(".anchor"))
    if name.startswith("replica."):
        return int(name.split(".")[1]) >= (job.layout.dp_replicate or 1)
    return _is_outer(name) and name.endswith(".momentum") and not job.communication.outer_momentum


def replicas_note(job: Job, run: Path) -> str | None:
    """What to tell where a run goes on with another number of replicas than it was saved with."""
    for folder in newest_first(run):
        try:
            names = read_manifest(folder).tensors
        except DamagedError:
            continue
        saved, now = replicas_in(names), job.layout.dp_replicate or 1
        if not has_outer(names) or (job.communication.takes_outer_steps and saved == now):
            return None
        if not job.communication.takes_outer_steps:
            return f"{folder} is of {saved} replicas: the run goes on from their outer weights"
        return f"{folder} is of {saved} replicas: of the {now} now, replica r goes on as r modulo {saved}"
    return None


def scale_tensors(scale: LossScale) -> dict[str, torch.Tensor]:
    return {
        "value": torch.tensor(scale.value, dtype=torch.float64),
        "good_steps": torch.tensor(scale.good_steps, dtype=torch.int64),
    }


def take_scale(state: State, scale: LossScale | None) -> None:
    """Take up the loss scale of another replica than the first, where the state has one."""
    for replica in state.get("replica", {}).values():
        if scale is not None and "scale" in replica:
            scale.value = replica["scale"]["value"].item()
            scale.good_steps = int(replica["scale"]["good_steps"])


def _is_outer(name: str) -> bool:
    return name.startswith("outer.")


def _of_replica(own: State, replica: int) -> State:
    return {"replica": {str(replica): own}} if replica else own


def _outer(outer: OuterStep, with_momentum: bool) -> dict[str, State]:
    weights, found = outer.weights, dict[str, State]()
    for index, name in enumerate(weights.names):
        found[name] = {"anchor": weights.whole_like(index, outer.anchors[index])}
        if with_momentum and outer.momenta is not None:
            found[name]["momentum"] = weights.whole_like(index, outer.momenta[index])
    return found


def _on_their_way(outer: OuterStep, shared: dict[str, State]) -> State:
    """What a replica has of averages on their way; the averages themselves are put among what is `shared`."""
    own: dict[str, dict[str, State]] = {}
    for flight in outer.flights:
        for kind, tensors in (
            ("arriving", flight.averages()),
            ("started", flight.before),
            ("lost", flight.lost),
        ):
            for index, tensor in zip(flight.indices, tensors, strict=bool(tensors)):
                name, whole = outer.weights.names[index], outer.weights.whole_like(index, tensor)
                place = shared[name] if kind == "arriving" else own.setdefault(kind, {})
                place.setdefault("arriving" if kind == "arriving" else name, {})[str(flight.started)] = whole
    return own


def _arriving(outer: OuterStep, names: Names) -> Iterator[Flight]:
    """The averages of a checkpoint, of what this rank has, with memory for them."""
    weights = outer.weights
    numbers = sorted(
        {int(name.rpartition(".")[2]) for name in names if _is_outer(name) and ".arriving." in name}
    )
    for number in numbers:
        indices = [i for i, name in enumerate(weights.names) if f"outer.{name}.arriving.{number}" in names]
        average, before = ([torch.empty_like(outer.anchors[index]) for index in indices] for _ in range(2))
        rounded = any(f"lost.{weights.names[index]}.{number}" in names for index in indices)
        lost = [torch.empty_like(each, dtype=torch.bfloat16) for each in before] if rounded else []
        yield Flight.arrived(number, indices, average, before, lost)
