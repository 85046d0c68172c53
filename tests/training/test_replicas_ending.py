"""How replicas that train alone end, save and fail together."""

from __future__ import annotations

import math
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.axes.checks import check
from fivefold.comm.world import World
from fivefold.config import Job, load, resolve
from fivefold.problems import BadInput, Problem
from fivefold.training.failures import RankFailure, RanksFailed
from fivefold.training.flight import LostReplicaError
from fivefold.training.ranks import run_ranks
from fivefold.training.stopping import SAVE, STOP
from tests.cases import batches, built_on_cpu
from tests.ranks import on_ranks
from tests.training.replica_cases import PLAIN, case


def ended(world: World, job: Job, asks: dict[int, int], slow: int) -> int:
    """After which step a rank ends that is asked to after another, of which one takes its time."""
    built = built_on_cpu(job)
    with batches(job, built) as loader:
        for step in range(1, job.training.steps + 1):
            time.sleep(0.2 if world.rank == slow else 0.0)
            built.step.asks = STOP * (asks.get(world.rank, 99) <= step)
            if built.step(next(loader), 1e-3, step).asked >= STOP:
                return step
    return job.training.steps + 1


@pytest.mark.parametrize(
    ("outer", "asks", "slow", "latest"),
    [
        (PLAIN, {0: 2, 1: 2}, 0, 2),
        (PLAIN, {0: 2, 1: 3}, 0, 3),
        (PLAIN, {0: 2}, 0, 5),  # the other waits for it after step 4
        ({"local_steps": 8}, {1: 1}, 1, 9),  # if it waits after the last step there is nothing left to end
        ({"outer_delay": 3}, {0: 2}, 0, 6),
        ({"outer_delay": 3, "compress": "int8"}, {0: 2}, 0, 5),  # it waits half-way, too
    ],
)
def test_all_replicas_end_after_the_same_step(
    outer: dict[str, Any], asks: dict[int, int], slow: int, latest: int
) -> None:
    """And without a wait for the end of a round: how early depends on how far ahead the other is."""
    first, second = on_ranks(ended, 2, case("", 2, {"zero": 0}, outer).job(), asks, slow)
    assert first == second
    assert min(asks.values()) <= first <= latest


def saves(world: World, job: Job) -> list[int]:
    """After which steps all ranks save, of which the first asks from step 2 on until it is done."""
    built, found = built_on_cpu(job), list[int]()
    with batches(job, built) as loader:
        for step in range(1, job.training.steps + 1):
            built.step.asks = SAVE * (world.rank == 0 and step >= 2 and not found)
            if built.step(next(loader), 1e-3, step).asked:
                found.append(step)
    return found


@pytest.mark.parametrize(("outer", "after"), [(PLAIN, 4), ({"outer_delay": 3}, 5)])
def test_all_replicas_save_once_after_the_same_step(outer: dict[str, Any], after: int) -> None:
    """Although it was asked for with every average that was started before."""
    assert on_ranks(saves, 2, case("", 2, {"zero": 0}, outer).job()) == [[after], [after]]


def spoiled(world: World, job: Job) -> list[tuple[float, str | None]]:
    """A weight of the last rank is lost in step 3; the first weight of each rank and the problem by step."""
    built, found = built_on_cpu(job), []
    with batches(job, built) as loader:
        for step in range(1, job.training.steps + 1):
            result = built.step(next(loader), 1e-3, step)
            if step == 3 and world.rank == world.size - 1:
                with torch.no_grad():
                    built.weights.masters[-1].view(-1)[0] = torch.inf
            found.append((built.weights.masters[-1].view(-1)[0].item(), result.problem))
    return found


def test_a_difference_that_is_not_finite_is_named_and_dropped_or_the_end() -> None:
    job = case("", 2, {"zero": 0}, {"local_steps": 4, "outer_lr": 1.0}, training={"clip": 0.0}).job()
    skipping = job.model_copy(update={"resilience": job.resilience.model_copy(update={"non_finite": "skip"})})
    name = "head.output.weight"
    for rank in on_ranks(spoiled, 2, skipping):
        steps = [problem for _, problem in rank]
        assert steps[3] is not None
        assert f"step 4: the weight {name} on rank 1 (replica 1) is not finite." in steps[3]
        assert math.isfinite(rank[-1][0])
    with pytest.raises(RanksFailed, match=r"not finite"):
        on_ranks(spoiled, 2, job)


def cut_off(world: World, job: Job) -> str:
    """What a rank says when the link between the replicas drops in the middle of a round."""
    built = built_on_cpu(job)
    with batches(job, built) as loader:
        for step in range(1, job.training.steps + 1):
            if step == 2 and world.rank == 1:
                drop_links()
            try:
                built.step(next(loader), 1e-3, step)
            except LostReplicaError as error:
                failure = RankFailure.of(world.rank, error)
                return f"{failure.is_death}: {failure.message}"
    return ""


def drop_links() -> None:
    """End every TCP connection of this process."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()  # one that only listens has none
                        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="connections are found in /proc")
def test_a_link_that_drops_names_the_replica_and_may_be_restarted() -> None:
    """`is_death`: the job's `resilience.restarts` apply to it."""
    said = run_ranks(cut_off, 2, case("", 2, {"zero": 0}, PLAIN).job())
    assert said[0].startswith("True: replica 1 (rank 1) did not send its part of the average of step 4:")
    assert said[1].startswith("True: replica 0 (rank 0) did not send its part of the average of step 4:")


def test_refusals() -> None:
    def refused(words: str, ranks: int = 2) -> list[str]:
        try:
            job = resolve(load(None, "tiny", words.split()), ranks)
        except BadInput as error:
            return [told(problem) for problem in error.problems]
        return [told(problem) for problem in check(job)]

    def told(problem: Problem) -> str:
        return f"{problem.key}: {problem.message}. {problem.hint}"

    two = "--layout.zero=0 --layout.dp_replicate=2 --training.steps=12 --communication."
    assert refused(f"{two}local_steps=4") == []
    assert refused(f"{two}local_steps=5") == [
        "communication.local_steps: 5 does not divide training.steps = 12: the last round would be shorter. "
        "Use communication.local_steps = 4 or 6, or training.steps = 10 or 15."
    ]
    assert (
        "Use communication.local_steps = 4 or 12,"
        in refused(f"{two}local_steps=5 --communication.fragments=4")[0]
    )
    assert refused(f"{two}local_steps=4 --communication.fragments=3") == [
        "communication.fragments: 3 does not divide communication.local_steps = 4: turns would be uneven. "
        "Use communication.fragments = 2 or 4, or communication.local_steps = 3 or 6."
    ]
    assert refused(f"{two}local_steps=4 --communication.outer_delay=5") == [
        "communication.outer_delay: 5 is longer than a round of communication.local_steps = 4. "
        "Use at most 4, or communication.local_steps = 5; at 1 any delay is allowed."
    ]
    assert refused(f"{two}outer_delay=5") == []
    assert refused(f"{two}outer_delay=5 --communication.outer_mix=0.5")[0].startswith(
        "communication.outer_mix: 0.5 where averages overtake each other"
    )
    assert refused(f"{two}fragments=2")[0].startswith("communication.fragments: 2 without outer steps")
    assert "rollback" in refused(f"{two}local_steps=4 --resilience.non_finite=rollback")[0]
    alone = refused("--layout.zero=3 --layout.dp_shard=2 --communication.local_steps=4")
    assert "layout.dp_replicate = 1, so there is nothing to average" in alone[0]
    assert refused("--layout.zero=3 --layout.dp_shard=2 --communication.outer_lr=1.0")
