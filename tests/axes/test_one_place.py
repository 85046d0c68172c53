"""What is planted in one place is seen by `account`, by the search and by the timeline alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fivefold.axes import context, data, tensor
from fivefold.config import Job, load, resolve
from fivefold.hardware.cluster import find_cluster
from fivefold.ledger import work
from fivefold.ledger.ledger import Message, Phase
from fivefold.ledger.setup import Setup
from fivefold.planner.answer import Answer
from fivefold.planner.play.simulated_step import simulated
from fivefold.replay.account import account
from tests.planner.goals import goal_for

CLUSTER = find_cluster("dgx-h100")
GPUS = 8
GIVEN: dict[str, Any] = {
    **{"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2, "pp": 1, "zero": 3, "cp_kind": "ring"},
    **{"micro_batch": 1, "recompute": "none"},
}


def job() -> Job:
    of_training = ("micro_batch", "recompute")
    layout = [f"--layout.{key}={value}" for key, value in GIVEN.items() if key not in of_training]
    words = ["--training.seq_len=8192", "--training.global_batch=16", "--training.micro_batch=1"]
    return resolve(load(preset="llama3.2-1b", overrides=[*words, *layout]), GPUS, "cuda")


def seen() -> dict[str, float]:
    """What the three say of one layout: its bytes on the wire and FLOPs, its step as searched, as played."""
    here = job()
    goal = goal_for(here.spec, GPUS, 8192, 16)
    ledger = account(here)
    return {
        "account": float(ledger.wire_bytes) + float(ledger.flops),
        "search": Answer(goal, CLUSTER).best_with(GIVEN).best[0].step_time,
        "timeline": simulated(here, CLUSTER).took.step_time,
    }


def another_message(module: Any, name: str, phase: Phase = "forward") -> Callable[[pytest.MonkeyPatch], None]:
    """One more all-reduce of 256 MiB over tp, among the messages that a function of an axis gives."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(module, name)

        def planted(setup: Setup, *args: Any, **named: Any) -> list[Message]:
            more = Message("all_reduce", 2**28, "tp", setup.tp, 1, phase)
            return [*real(setup, *args, **named), more]

        patch.setattr(module, name, planted)

    return plant


def costlier_attention(patch: pytest.MonkeyPatch) -> None:
    """Attention of twice the FLOPs."""
    real = work._attention

    def planted(setup: Setup) -> Iterator[work.Work]:
        for item in real(setup):
            yield replace(item, flops=2 * item.flops) if item.kind == "attention" else item

    patch.setattr(work, "_attention", planted)


PLANTED = {
    "a message of the context axis": another_message(context, "block_messages"),
    "a message of the tensor axis": another_message(tensor, "block_messages"),
    "a message of the head": another_message(tensor, "head_messages"),
    "a message of the data axis": another_message(data, "group_messages", "backward"),
    "costlier attention": costlier_attention,
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_it_is_seen_by_all_three(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    before = seen()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        after = seen()
    assert {name: after[name] > before[name] * (1 + 1e-6) for name in before} == dict.fromkeys(before, True)
    assert seen() == before
