"""A rank killed in the middle of an axis' exchange ends the job at once, and is the one that is named."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest

from fivefold.axes.runtime import expert_split, ring
from fivefold.comm.world import World
from fivefold.training.failures import RanksFailed
from fivefold.training.ranks import run_ranks
from tests.cases import SPEC, Case, losses
from tests.training.test_launch import gone, leave_id, wait_for

Moment = Literal["while it waits for the other", "while the other waits for it"]

EXPERTS = SPEC | {"experts": 4, "experts_per_token": 2}
EXCHANGES: dict[str, tuple[Any, str, Case]] = {
    "expert all-to-all": (
        expert_split,
        "all_to_all",
        Case("experts", 2, {"dp_shard": 2, "ep": 2, "zero": 3}, {"steps": 2}, spec=EXPERTS),
    ),
    "ring": (ring, "Exchange", Case("ring", 2, {"cp": 2, "cp_kind": "ring"}, {"steps": 2})),
}
GO_WELL = 10
"""Exchanges before the last: the ring is then in its first backward pass, experts in the second step."""


def train_until_killed(world: World, exchange: str, moment: Moment, folder: Path) -> None:
    """Train, and let rank 1 die at an exchange; the process dies alone, as if it had run out of memory."""
    room, name, case = EXCHANGES[exchange]
    leave_id(folder, world)
    setattr(room, name, interrupted(getattr(room, name), world, moment, wait_for(folder, 2)[1]))
    losses(case.job())


def interrupted(
    exchange: Callable[..., Any], world: World, moment: Moment, victim: int
) -> Callable[..., Any]:
    """The exchange, with a death at one of its calls, to which one of the ranks has not yet come."""
    calls = count()
    waiting = moment == "while it waits for the other"

    def at_its_time(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == GO_WELL:
            if world.rank == 1:
                threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
            if (world.rank == 1) != waiting:
                gone([victim])
        return exchange(*args, **kwargs)

    return at_its_time


@pytest.mark.timeout(120)  # a rank that waited for a collective's own timeout would wait for half an hour
@pytest.mark.parametrize("moment", ["while it waits for the other", "while the other waits for it"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_killed_rank_is_named_and_none_stays(exchange: str, moment: Moment, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(train_until_killed, 2, exchange, moment, tmp_path, errors=tmp_path / "errors")
    first = caught.value.failures[0]
    assert first.rank == 1
    assert "SIGKILL" in first.message
    assert str(caught.value).startswith("rank 1 failed")
    assert gone(wait_for(tmp_path, 2), within=1)
