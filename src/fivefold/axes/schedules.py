"""Pipeline schedules: what each rank does, in which order. No torch here: planners replay these lists too.

    naive        a micro-batch goes all the way forward and back before the next one starts
    gpipe        all forwards, then all backwards
    1f1b         as few forwards as fill the pipeline, then one backward for each further forward
    interleaved  1f1b in which a rank holds several stages, and runs the micro-batches through them in rounds
    looped-bfs   several stages a rank; all micro-batches through one stage, then through the next
    zero-bubble  interleaved, its backward cut in two: gradients of inputs at once, of weights in idle time
    zbv          the same with two stages a rank, laid out like a V: the first rank has the first and the last
    dualpipev    a V as well, with a forward of one stage next to the backward of the other
    zb-h1        1f1b, its backward cut in two; no rank keeps more micro-batches than 1f1b's first
    zb-h2        the same with nearly twice as many in flight, which leaves hardly a gap

Under a loop stage s is on rank s mod ranks; under a V the stages go down the ranks and come back up.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
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


class Action(NamedTuple):
    """One thing a rank does for one stage and one micro-batch.

    `backward` is both halves at once: `backward-input`, which the stage before waits for, and
    `backward-weight`. A send is to the next stage (activations) or the one before (gradients), a receive
    from there. `reduce`: all micro-batches of this stage are done (its micro-batch is -1).
    """

    kind: Kind
    stage: int
    micro_batch: int


ONE_STAGE = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
"""Schedules under which a rank holds one stage."""
V_SHAPED = ("zbv", "dualpipev")
"""Schedules under which it holds two, laid out like a V."""
SCHEDULES = (*ONE_STAGE, "interleaved", "looped-bfs", "zero-bubble", *V_SHAPED)
"""All there are. (A job can name all but zb-h1 and zb-h2, which are for planning.)"""
SPLITS_BACKWARD = ("zero-bubble", "zbv", "dualpipev", "zb-h1", "zb-h2")
"""Schedules that compute gradients of inputs and of weights at different times."""


def stages_on(schedule: str, rank: int, ranks: int, virtual_stages: int) -> list[int]:
    """The stages of one rank, in forward order."""
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(virtual_stages)]


def rank_of_stage(schedule: str, stage: int, ranks: int) -> int:
    """The rank that holds a stage."""
    if schedule in V_SHAPED and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def fewest_micro_batches(schedule: str, ranks: int) -> int:
    """With fewer than these the schedule is not defined."""
    return {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)


def allows(schedule: str, ranks: int, micro_batches: int) -> bool:
    """Whether the schedule is defined for this many micro-batches on this many ranks."""
    if schedule in ("interleaved", "zero-bubble") and micro_batches % _rounds(ranks, micro_batches):
        return False
    return micro_batches >= fewest_micro_batches(schedule, ranks)


def _rounds(ranks: int, micro_batches: int) -> int:
    """In how many equal rounds interleaved micro-batches go: each as near as possible to one a rank."""
    return max(1, micro_batches // ranks)


def actions(schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """What every rank does in one step, rank by rank, sends and receives included.

    Any two ranks name the messages between them in the same order, so that none waits for the other's later
    one. Stages that are neighbours on one rank hand over without a message.
    """
    if not allows(schedule, ranks, micro_batches):
        raise ValueError(f"{schedule} is not defined for {micro_batches} micro-batches on {ranks} ranks")
    computed = [compute_order(schedule, rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)]
    placed = [_with_reduce(order, micro_batches) for order in computed]
    stages = ranks * len(stages_on(schedule, 0, ranks, virtual_stages))
    return _with_messages(placed, stages, lambda stage: rank_of_stage(schedule, stage, ranks))


def compute_order(
    schedule: str, rank: int, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> list[Action]:
    """What one rank computes in one step, without messages."""
    own = stages_on(schedule, rank, ranks, virtual_stages)
    if schedule == "zbv":
        return list(_zbv(rank, ranks, micro_batches, *own))
    if schedule == "dualpipev":
        return _DualPipeV(rank, ranks, micro_batches, *own).order
    if schedule in ("zb-h1", "zb-h2"):
        return list(_handcrafted(rank, ranks, micro_batches, reach=1 if schedule == "zb-h1" else 2))
    if schedule in ("interleaved", "zero-bubble"):
        return list(_interleaved(schedule, rank, ranks, micro_batches, own))
    return list(_plain(schedule, rank, ranks, micro_batches, own))


# --- the orders --------------------------------------------------------------------------------------------


def _plain(schedule: str, rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """naive, gpipe, 1f1b, looped-bfs."""
    if schedule == "looped-bfs":
        yield from (Action("forward", stage, number) for stage in own for number in range(count))
        backwards = [(stage, number) for stage in own for number in range(count)]
        yield from (Action("backward", stage, number) for stage, number in reversed(backwards))
        return
    ahead = {"naive": 0, "gpipe": count}.get(schedule, min(count, ranks - 1 - rank))
    yield from (Action("forward", rank, number) for number in range(ahead))
    for number in range(count):
        if number + ahead < count:
            yield Action("forward", rank, number + ahead)
        yield Action("backward", rank, number)


def _handcrafted(rank: int, ranks: int, count: int, reach: int) -> Iterator[Action]:
    """zb-h1 and zb-h2, drawn by hand in the Zero Bubble paper (arXiv 2401.10241, section 2).

    A rank runs `reach` forwards ahead for each rank behind it, and its weight halves come `reach` backwards
    late for each rank before it: so all keep the same number of micro-batches.
    """
    ahead, late = reach * (ranks - 1 - rank), reach * rank
    yield from (Action("forward", rank, number) for number in range(min(ahead, count)))
    for number in range(count):
        if number + ahead < count:
            yield Action("forward", rank, number + ahead)
        yield Action("backward-input", rank, number)
        if number >= late:
            yield Action("backward-weight", rank, number - late)
    yield from (Action("backward-weight", rank, number) for number in range(max(0, count - late), count))


def _interleaved(schedule: str, rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """interleaved and zero-bubble. Both walk through the stages in turns of one round of micro-batches."""
    split = schedule == "zero-bubble"
    per_round = count // _rounds(ranks, count)
    total = count * len(own)
    forwards = _in_turns(own, per_round, total)
    backwards = _in_turns(own[::-1], per_round, total)
    ahead = min((len(own) - 1) * per_round + (1 if split else 2) * (ranks - 1 - rank), total)
    yield from (Action("forward", *forwards[turn]) for turn in range(ahead))
    for turn in range(total):
        if turn + ahead < total:
            yield Action("forward", *forwards[turn + ahead])
        yield Action("backward-input" if split else "backward", *backwards[turn])
        if split and turn >= rank:
            yield Action("backward-weight", *backwards[turn - rank])
    if split:
        yield from (Action("backward-weight", *pair) for pair in backwards[max(0, total - rank) :])


def _in_turns(own: list[int], per_round: int, total: int) -> list[tuple[int, int]]:
    """(stage, micro-batch) when stages take turns, each with the next `per_round` of its micro-batches."""
    next_of: defaultdict[int, int] = defaultdict(int)
    found = []
    for turn in range(total):
        stage = own[turn // per_round % len(own)]
        found.append((stage, next_of[stage]))
        next_of[stage] += 1
    return found


def _zbv(rank: int, ranks: int, count: int, down: int, up: int) -> Iterator[Action]:
    """`down` and `up` are the rank's stages on the two arms of the V."""
    full = max(2 * ranks - 1, count)  # laid out for a full pipeline; what is beyond `count` falls away
    next_of: defaultdict[tuple[Kind, int], int] = defaultdict(int)

    def do(*steps: tuple[Kind, int]) -> Iterator[Action]:
        for step in steps:
            kind, stage = step
            if next_of[step] < count:
                yield Action(kind, stage, next_of[step])
            next_of[step] += 1

    forward_down: tuple[Kind, int] = ("forward", down)
    forward_up: tuple[Kind, int] = ("forward", up)
    input_down: tuple[Kind, int] = ("backward-input", down)
    input_up: tuple[Kind, int] = ("backward-input", up)
    weight_down: tuple[Kind, int] = ("backward-weight", down)
    weight_up: tuple[Kind, int] = ("backward-weight", up)
    yield from do(*[forward_down] * (2 * (ranks - rank) - 1))
    yield from do(*[forward_up, forward_down] * rank)
    yield from do(*[forward_up, input_up, weight_up] * (ranks - rank))
    while next_of[forward_up] < next_of[forward_down] or next_of[forward_down] < full:
        if next_of[forward_down] < full:
            yield from do(forward_down)
        yield from do(input_down, weight_down, forward_up, input_up, weight_up)
    yield from do(*[input_down, input_up] * rank)
    yield from do(*[input_down, weight_down] * (ranks - rank))
    yield from do(*[weight_up] * (next_of[input_up] - next_of[weight_up]))
    yield from do(*[weight_down] * (next_of[input_down] - next_of[weight_down]))


class _DualPipeV:
    """Eight phases; in the long one a forward of one arm of the V goes with a backward of the other."""

    def __init__(self, rank: int, ranks: int, count: int, down: int, up: int):
        self.order: list[Action] = []
        self.next_of: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.postponed: deque[tuple[int, int]] = deque()
        below = ranks - 1 - rank  # ranks nearer to the tip of the V
        for _ in range(2 * below):
            self.forward(down)
        for _ in range(rank + 1):
            self.forward(down)
            self.forward(up)
        for _ in range(below):
            self.backward(up, split=True)
            self.weight()
            self.forward(up)
        for _ in range(count - 2 * ranks + rank + 1):
            self.forward(down)
            self.backward(up)
            self.forward(up)
            self.backward(down)
        for _ in range(below):
            self.backward(up)
            self.forward(up)
            self.backward(down)
        middle = (rank + 1) // 2
        for turn in range(rank + 1):
            self.backward(up, split=turn > middle or (turn == middle and rank % 2 == 1))
            self.backward(down, split=turn >= middle)
        for _ in range(below):
            self.weight()
            self.backward(down, split=True)
        for _ in range(rank + 1):
            self.weight()

    def forward(self, stage: int) -> None:
        self.order.append(Action("forward", stage, self.number("forward", stage)))

    def backward(self, stage: int, split: bool = False) -> None:
        number = self.number("backward", stage)
        self.order.append(Action("backward-input" if split else "backward", stage, number))
        if split:
            self.postponed.append((stage, number))

    def weight(self) -> None:
        """The weight half that has waited longest, if any waits."""
        if self.postponed:
            self.order.append(Action("backward-weight", *self.postponed.popleft()))

    def number(self, kind: str, stage: int) -> int:
        """The next micro-batch of a stage in one direction."""
        found = self.next_of[kind, stage]
        self.next_of[kind, stage] += 1
        return found


# --- messages ----------------------------------------------------------------------------------------------


def _with_reduce(order: list[Action], micro_batches: int) -> list[Action]:
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


def _with_messages(
    computed: list[list[Action]], stages: int, rank_of: Callable[[int], int]
) -> list[list[Action]]:
    """Play all ranks in step; when one sends, the receive goes into the other's list at that moment.

    That is one order of all messages which every rank keeps, so no circle of ranks can wait for each other.
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
