"""What a rank of a pipeline does, action by action, its messages included; and what such a list shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "backward-input",
    "backward-weight",
    "send-activation",
    "receive-activation",
    "send-gradient",
    "receive-gradient",
    "reduce",
]
COMPUTATIONS: tuple[Kind, ...] = ("forward", "backward", "backward-input", "backward-weight")
"""The actions that take time."""


class Action(NamedTuple):
    """One thing a rank does for one stage and one micro-batch.

    `backward` is both halves at once: `backward-input`, which the stage before waits for, and
    `backward-weight`. A send is to the next stage (activations) or the one before (gradients), a receive
    from there. `reduce`: all micro-batches of this stage are done (its micro-batch is -1).
    """

    kind: Kind
    stage: int
    micro_batch: int


def with_reduce(order: Iterable[Action], micro_batches: int) -> list[Action]:
    """`reduce` behind the last backward of each stage."""
    left: defaultdict[int, int] = defaultdict(lambda: micro_batches)
    found = []
    for action in order:
        found.append(action)
        if action.kind in ("backward", "backward-weight"):
            left[action.stage] -= 1
            if left[action.stage] == 0:
                found.append(Action("reduce", action.stage, -1))
    return found


def with_messages(
    computed: Sequence[Sequence[Action]], stages: int, rank_of: Callable[[int], int]
) -> list[list[Action]]:
    """Every rank's computations, with the messages between them.

    All ranks are played in step; when one sends, the receive goes into the other's list at that moment. That
    is one order of all messages which every rank keeps, so no circle of ranks can wait for each other. Stages
    that are neighbours on one rank hand over without a message.
    """
    placed: list[list[Action]] = [[] for _ in computed]
    arrived: set[tuple[str, int, int]] = set()
    positions = [0] * len(computed)
    while any(position < len(order) for position, order in zip(positions, computed, strict=True)):
        moved = False
        for rank, order in enumerate(computed):
            if positions[rank] == len(order):
                continue
            action = order[positions[rank]]
            kind, stage, number = action
            forward = kind == "forward"
            waits = (forward and stage > 0) or (kind in ("backward", "backward-input") and stage < stages - 1)
            if waits and ("activation" if forward else "gradient", stage, number) not in arrived:
                continue
            positions[rank] += 1
            moved = True
            placed[rank].append(action)
            target = stage + 1 if forward else stage - 1
            if kind in ("reduce", "backward-weight") or not 0 <= target < stages:
                continue
            if rank_of(target) != rank:
                placed[rank].append(Action("send-activation" if forward else "send-gradient", stage, number))
                received: Kind = "receive-activation" if forward else "receive-gradient"
                placed[rank_of(target)].append(Action(received, target, number))
            arrived.add(("activation" if forward else "gradient", target, number))
        if not moved:
            raise ValueError("the order of computations has a circle: every rank waits for another")
    return placed


def most_kept(order: Iterable[Action]) -> int:
    """The most (stage, micro-batch) pairs between their forward and their weights' gradients."""
    now = most = 0
    for action in order:
        now += action.kind == "forward"
        most = max(most, now)
        now -= action.kind in ("backward", "backward-weight")
    return most


def most_waiting(order: Sequence[Action]) -> int:
    """How many of them are between the two halves of their backward at the fullest moment.

    There a pair that waits counts twice; what that makes more than the most kept is the answer.
    """
    kept = half_done = fullest = 0
    for action in order:
        kept += action.kind == "forward"
        half_done += action.kind == "backward-input"
        fullest = max(fullest, kept + half_done)
        kept -= action.kind in ("backward", "backward-weight")
        half_done -= action.kind == "backward-weight"
    return fullest - most_kept(order)


def forwards_first(order: Iterable[Action]) -> bool:
    """Whether each stage's forward passes all come before its backward passes."""
    turned: set[int] = set()
    for action in order:
        if action.kind == "forward" and action.stage in turned:
            return False
        if action.kind in ("backward", "backward-input"):
            turned.add(action.stage)
    return True
