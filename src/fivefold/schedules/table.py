"""Every pipeline schedule, one row each: all that the rest of the program knows of it.

A new schedule is a new row: its name, a line on it, its order of computations, how many stages a rank holds
and their shape. All else has a default, or is counted in the order.
"""

from functools import partial

from fivefold.problems import BadInput, Problem, did_you_mean
from fivefold.schedules.orders import dualpipev, forwards_first, in_turns, zbv
from fivefold.schedules.schedule import Schedule

ONE_BY_ONE = partial(in_turns, reach=0)
row = partial(Schedule, proven=True)

ALONE = row("", "without a pipeline: one micro-batch after the other", ONE_BY_ONE, use="planning")
"""What stands for a schedule where there is no pipeline."""

_ROWS = (
    row(
        "naive",
        "a micro-batch goes all the way forward and back before the next one starts",
        ONE_BY_ONE,
        use="job",  # slower than others, as are gpipe and looped-bfs, which keep more as well
    ),
    row("gpipe", "all forwards, then all backwards", partial(forwards_first, back=1), use="job"),
    row(
        "1f1b",
        "as few forwards as fill the pipeline, then one backward for each further forward",
        partial(in_turns, reach=1),
        micro_batches_per_rank=1,
    ),
    row(
        "interleaved",
        "1f1b in which a rank holds several stages, and runs the micro-batches through them in rounds",
        partial(in_turns, reach=2),
        stages=None,
        equal_rounds=True,
    ),
    row(
        "looped-bfs",
        "several stages a rank; all micro-batches through one stage, then through the next",
        partial(forwards_first, back=-1),
        stages=None,
        use="job",
    ),
    row(
        "zero-bubble",
        "interleaved, its backward cut in two: gradients of inputs at once, of weights in idle time",
        partial(in_turns, reach=1, halves=True),
        stages=None,
        equal_rounds=True,
    ),
    row(
        "zbv",
        "the same with two stages a rank, laid out like a V: the first rank has the first and the last",
        zbv,
        stages=2,
        shape="v",
    ),
    row(
        "dualpipev",
        "a V as well, with a forward of one stage next to the backward of the other",
        dualpipev,
        stages=2,
        shape="v",
        micro_batches_per_rank=2,
    ),
    row(
        "zb-h1",
        "1f1b, its backward cut in two; no rank keeps more micro-batches than 1f1b's first",
        partial(in_turns, reach=1, halves=True),
        use="planning",
    ),
    row(
        "zb-h2",
        "the same with nearly twice as many in flight, which leaves hardly a gap",
        partial(in_turns, reach=2, halves=True),
        use="planning",
    ),
    row(
        "zb-1p",
        "an order that is searched for, with as much memory as 1f1b's first rank takes",
        memory_limit=1,
        use="planning",
    ),
    row("zb-2p", "the same with twice as much memory", memory_limit=2, use="planning"),
)

SCHEDULES: dict[str, Schedule] = {row.name: row for row in _ROWS}


def schedule_named(name: str, key: str = "layout.schedule") -> Schedule:
    """A row of the table. Raises `BadInput` for an unknown name, with the `key` under which it was given."""
    if name not in SCHEDULES:
        raise BadInput([Problem(key, f"'{name}' is unknown", did_you_mean(name, SCHEDULES))])
    return SCHEDULES[name]
