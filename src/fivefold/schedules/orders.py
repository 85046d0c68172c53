"""What each rank computes, in which order, by pipeline schedule.

All take the rank's place, the number of ranks and of micro-batches (`count`), and the rank's own stages in
forward order. Messages are added later (`actions.py`). Numpy is imported where an order is made: jobs are
read without it.
"""

from collections.abc import Callable, Iterable

from fivefold.schedules.actions import COMPUTATIONS, Action, Computed

Order = Callable[[int, int, int, list[int]], Iterable[Action]]
"""(rank, ranks, micro-batches, own stages) -> what the rank computes: actions, or quicker as `Computed`."""

F, B, I, W = range(len(COMPUTATIONS))  # noqa: E741


def forwards_first(rank: int, ranks: int, count: int, own: list[int], *, back: int) -> Computed:
    """All micro-batches through one stage, then through the next; and back.

    back  1: in the order of the forwards; -1: the last one first
    """
    import numpy as np

    stages, numbers = np.repeat(own, count), np.tile(np.arange(count), len(own))
    there_and_back = (np.concatenate([column, column[::back]]) for column in (stages, numbers))
    return Computed(np.repeat([F, B], len(numbers)), *there_and_back)


def in_turns(
    rank: int, ranks: int, count: int, own: list[int], *, reach: int, halves: bool = False
) -> Computed:
    """Some forwards first, then a forward and a backward in turns.

    Several stages take turns, each with the micro-batches of one round. Rounds are equal, each near to one
    micro-batch a rank.

    reach   how many forwards a rank runs ahead for each rank behind it, once all its stages had their turn
    halves  backward is cut in two, and weight halves come `reach` backwards late for each rank before: so all
            ranks keep the same number of micro-batches (arXiv 2401.10241, section 2)
    """
    import numpy as np

    together = count // max(1, count // ranks)
    place, number = np.divmod(np.arange(len(own) * count), count)
    forwards = np.lexsort((number, place, number // together))
    backwards = np.lexsort((number, -place, number // together))
    ahead, turn = (len(own) - 1) * together + reach * (ranks - 1 - rank), np.arange(len(number))
    done = [(F, forwards, 3 * (turn - ahead)), (I if halves else B, backwards, 3 * turn + 1)]
    if halves:
        done.append((W, backwards, 3 * (turn + reach * rank) + 2))
    order = np.argsort(np.concatenate([moments for _, _, moments in done]))
    pairs = np.concatenate([pairs for _, pairs, _ in done])[order]
    kinds = np.repeat([kind for kind, _, _ in done], len(turn))[order]
    return Computed(kinds, np.array(own)[place[pairs]], number[pairs])


# --- two stages a rank, the arms of a V --------------------------------------------------------------------

Step = tuple[int, int]
"""What is done for a stage; its micro-batch is the next one."""


def zbv(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """Both halves of backward are always apart."""
    down, up = own
    full = max(2 * ranks - 1, count)  # laid out for a full pipeline; what is beyond `count` falls away
    below = ranks - 1 - rank  # ranks nearer to the tip of the V
    steps: list[Step] = [
        *[(F, down)] * (2 * below + 1),
        *[(F, up), (F, down)] * rank,
        *[(F, up), (I, up), (W, up)] * (below + 1),
        *[(F, down), (I, down), (W, down), (F, up), (I, up), (W, up)] * (full - 2 * ranks + rank + 1),
        *[(I, down), (W, down), (F, up), (I, up), (W, up)] * below,
        *[(I, down), (I, up)] * rank,
        *[(I, down), (W, down)] * (below + 1),
        *[(W, up)] * rank,
        *[(W, down)] * rank,
    ]
    return _numbered(steps, count)


def dualpipev(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """In the longest phase a forward of one arm goes with a backward of the other."""
    down, up = own
    below = ranks - 1 - rank  # ranks nearer to the tip of the V
    # Backward is whole in the first half of the last backwards, and cut in two from there on.
    turning: list[Step] = [(B, up), (B, down)] * (rank + 1)
    turning[rank + 1 :] = [(I, stage) for _, stage in turning[rank + 1 :]]
    postponed = [stage for kind, stage in turning if kind == I] + [down] * below
    steps: list[Step] = [
        *[(F, down)] * (2 * below),
        *[(F, down), (F, up)] * (rank + 1),
        *[(I, up), (W, up), (F, up)] * below,
        *[(F, down), (B, up), (F, up), (B, down)] * (count - 2 * ranks + rank + 1),
        *[(B, up), (F, up), (B, down)] * below,
        *turning,
        *[step for stage in postponed[:below] for step in ((W, stage), (I, down))],
        *[(W, stage) for stage in postponed[below:]],
    ]
    return _numbered(steps, count)


def _numbered(steps: Iterable[Step], count: int) -> Computed:
    """The steps as actions: each takes the next micro-batch of its stage, if there is one.

    A weight half takes the one whose input half was done first.
    """
    import numpy as np

    kinds, stages = np.array(list(steps)).T
    numbers = np.empty(len(kinds), dtype=np.int64)
    for stage in np.unique(stages):
        for some in ((F,), (B, I)):
            mine = np.flatnonzero((stages == stage) & np.isin(kinds, some))
            numbers[mine] = np.arange(len(mine))
        halves, others = ((stages == stage) & (kinds == kind) for kind in (I, W))
        numbers[others] = numbers[halves]
    there = numbers < count
    return Computed(kinds[there], stages[there], numbers[there])
