"""What a rank of a pipeline does, action by action, its messages included."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    import numpy.typing as npt

Computation = Literal["forward", "backward", "backward-input", "backward-weight"]
"""The actions that take time."""
Message = Literal["send-activation", "receive-activation", "send-gradient", "receive-gradient"]
Kind = Literal[Computation, Message, "reduce"]
COMPUTATIONS: tuple[Computation, ...] = get_args(Computation)


class Action(NamedTuple):
    """One thing a rank does for one stage and one micro-batch.

    `backward` is both halves at once: `backward-input`, which the stage before waits for, and
    `backward-weight`. A send is to the next stage (activations) or the one before (gradients), a receive
    from there. `reduce`: all micro-batches of this stage are done (its micro-batch is -1).
    """

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Computed:
    """What one rank computes, in order: its actions, as arrays [computations].

    kinds  indices into `COMPUTATIONS`
    """

    kinds: npt.NDArray[Any]
    stages: npt.NDArray[Any]
    micro_batches: npt.NDArray[Any]

    @classmethod
    def of(cls, actions: Iterable[Action]) -> Computed:
        """The computations among a rank's actions."""
        if isinstance(actions, cls):
            return actions
        import numpy as np

        rows = [(COMPUTATIONS.index(kind), *where) for kind, *where in actions if kind in COMPUTATIONS]
        return cls(*np.array(rows).T)

    def __iter__(self) -> Iterator[Action]:
        columns = (column.tolist() for column in (self.kinds, self.stages, self.micro_batches))
        return (Action(COMPUTATIONS[kind], *where) for kind, *where in zip(*columns, strict=True))


def with_reduce(order: Sequence[Action]) -> list[Action]:
    """`reduce` behind the last backward of each stage."""
    last = {action.stage: action for action in order if action.kind in ("backward", "backward-weight")}
    found = []
    for action in order:
        found.append(action)
        if action == last.get(action.stage):
            found.append(Action("reduce", action.stage, -1))
    return found


def with_messages(
    computed: Iterable[Sequence[Action]], stages: int, rank_of: Callable[[int], int]
) -> list[list[Action]]:
    """Every rank's computations, with the messages between them.

    All ranks are played in step; when one sends, the receive goes into the other's list at that moment. That
    is one order of all messages which every rank keeps, so no circle of ranks can wait for each other. Stages
    that are neighbours on one rank hand over without a message.
    """
    left = [deque(order) for order in computed]
    placed: list[list[Action]] = [[] for _ in left]
    done: set[tuple[bool, int, int]] = set()  # (forward, stage, micro-batch)
    while any(left):
        before = sum(map(len, left))
        for rank, order in enumerate(left):
            if not order:
                continue
            kind, stage, number = order[0]
            forward = kind == "forward"
            source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            hands_over = kind in ("forward", "backward", "backward-input")
            if hands_over and 0 <= source < stages and (forward, source, number) not in done:
                continue
            placed[rank].append(order.popleft())
            if not hands_over:
                continue
            done.add((forward, stage, number))
            if 0 <= target < stages and rank_of(target) != rank:
                placed[rank].append(Action("send-activation" if forward else "send-gradient", stage, number))
                received: Kind = "receive-activation" if forward else "receive-gradient"
                placed[rank_of(target)].append(Action(received, target, number))
        if sum(map(len, left)) == before:
            raise ValueError("the order of computations has a circle: every rank waits for another")
    return placed
