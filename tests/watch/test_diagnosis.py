"""Who waits for whom, from made-up heartbeats: every case gives a sentence that names the right rank."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.watch.beat import PHASES, Beat, Group, path_of, read_beat, read_beats, written
from fivefold.watch.diagnosis import Diagnosis, diagnose, has_stalled, stragglers
from fivefold.watch.processes import State, innermost
from tests.source import FILES, tree

NOW = 1_000_000.0
COMPUTING, REDUCING, SUMMING = "forward and backward", "gradient reduction", "loss and norm"


def beat(rank: int, ranks: int = 4, phase: str = REDUCING, waits: bool = True, **more) -> Beat:
    """A rank that has stood in step 87 for 34 s."""
    usual = {
        "host": "h",
        "pid": 100 + rank,
        "born": 1,
        "step": 87,
        "part": 0,
        "moved": NOW - 34,
        "at": NOW - 1,
    }
    return Beat(
        **{"rank": rank, "ranks": ranks, "phase": phase, "patience": 600.0, "waits": waits, **usual, **more}
    )


def test_every_phase_that_a_rank_tells_can_be_read() -> None:
    told = {
        node.args[0].value
        for module in FILES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "tell"
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    assert {"forward and backward", "checkpoint"} < told <= {*PHASES}


def group(ranks: tuple[int, ...], count: int, *names: str) -> Group:
    """A group, with the names of the last collectives that were entered."""
    return Group(ranks, count, {count - len(names) + 1 + i: name for i, name in enumerate(names)})


def found(beats: list[Beat], **states: State) -> Diagnosis:
    known = {each.rank: states.get(f"rank{each.rank}", "runs") for each in beats}
    return diagnose(beats, known, NOW)


def tp(rank: int, count: int) -> dict[str, Group]:
    return {"tp": group((0, 1, 2, 3), count, "all-gather", "all-reduce")}


def test_the_sentence():
    beats = [beat(rank, groups=tp(rank, 412)) for rank in (0, 1, 2)]
    late = beat(3, phase="data loading", waits=False, groups=tp(3, 411), where="mine.py:7 in sample")
    told = found([*beats, late])
    assert told.sentence == (
        "rank 3 never entered all-reduce #412 (tp) of step 87: it is in data loading at mine.py:7 in sample; "
        "the others wait since 34 s"
    )
    assert (told.ok, told.ranks, told.step, told.phase) == (False, (3,), 87, "data loading")


@pytest.mark.parametrize("waits", [True, False])
def test_who_waits_is_told_from_who_is_waited_for_though_hosts_run_ahead_of_devices(waits):
    """On GPUs no rank is seen inside a collective: counts tell."""
    beats = [beat(rank, waits=waits, groups=tp(rank, 411 if rank == 2 else 412)) for rank in range(4)]
    beats[2] = replace(beats[2], waits=False, phase="optimizer")
    assert found(beats).ranks == (2,)


def test_who_waits_for_one_that_waits_is_not_blamed():
    """Rank 1 waits for rank 3 in dp; rank 0 for rank 1 in tp."""
    first, second = (0, 1), (1, 3)
    beats = [
        beat(0, groups={"tp": group(first, 5)}),
        beat(1, groups={"tp": group(first, 4), "dp_shard": group(second, 9, "reduce-scatter")}),
        beat(3, waits=False, phase=COMPUTING, part=2, groups={"dp_shard": group(second, 8)}),
        beat(2, groups={}),
    ]
    told = found(beats)
    assert told.ranks == (3,)
    assert "never entered reduce-scatter #9 (dp_shard)" in told.sentence
    assert "forward and backward (of micro-batch 2)" in told.sentence


def test_a_pipelines_messages_are_not_counted():
    beats = [beat(0, 2, phase=COMPUTING, groups={"pp": group((0, 1), 7)})]
    beats.append(
        beat(1, 2, phase=COMPUTING, waits=False, groups={"pp": group((0, 1), 3)}, where="m.py:1 in f")
    )
    told = found(beats)
    assert told.ranks == (1,)
    assert told.sentence.startswith(
        "rank 1 of step 87 keeps the others waiting: it is in forward and backward"
    )


def test_a_collective_left_out():
    """dp 2 x tp 2: rank 1 left out dp's sum, and waits for the others in that of all."""
    everyone = (0, 1, 2, 3)
    numbers = {0: (6, 9, 12), 1: (5, 9, 12), 2: (6, 9, 11), 3: (6, 8, 11)}
    beats = [
        beat(
            rank,
            phase=SUMMING if rank < 2 else REDUCING,
            groups={
                "dp_replicate": group((rank % 2, rank % 2 + 2), dp, "all-reduce"),
                "tp": group((rank // 2 * 2, rank // 2 * 2 + 1), tensor, "all-reduce"),
                "all ranks": group(everyone, every, "all-reduce"),
            },
        )
        for rank, (dp, tensor, every) in numbers.items()
    ]
    told = found(beats)
    assert told.ranks == (1,)
    assert told.sentence.startswith(
        "rank 1 never entered all-reduce #6 (dp_replicate) of step 87: it left it out, and is in loss and"
    )


def test_a_collective_left_out_by_one_of_two_who_are_equally_far():
    one = {"tp": group((0, 1), 5, "all-reduce"), "dp": group((0, 1), 2)}
    two = {"tp": group((0, 1), 4), "dp": group((0, 1), 3, "broadcast")}
    told = found([beat(0, 2, groups=one), beat(1, 2, groups=two)])
    assert told.ranks == (0, 1)
    assert "wait for each other" in told.sentence
    assert "#5 (tp)" in told.sentence
    assert "#3 (dp)" in told.sentence


def test_a_stopped_process():
    beats = [beat(rank, groups=tp(rank, 411 if rank == 3 else 412)) for rank in range(4)]
    beats[3] = replace(beats[3], step=85, waits=False, phase="optimizer")  # its last word is a second old
    told = found(beats, rank3="stopped")
    assert (told.ranks, told.step, told.phase) == ((3,), 87, "optimizer")
    assert "its process 103 on h is stopped (kill -CONT 103 lets it go on), in optimizer" in told.sentence


def test_a_rank_that_never_started():
    told = found([beat(0, 2, phase="build", step=0)])
    assert (told.ok, told.ranks, told.phase) == (False, (1,), "start")
    assert told.sentence.startswith("rank 1 of 2 never started")


def test_a_dead_rank_and_a_dead_run():
    beats = [beat(rank, 2) for rank in range(2)]
    told = diagnose(beats, {0: "runs", 1: "gone"}, NOW, {1: "ValueError: no"})
    assert told.ranks == (1,)
    assert (
        "rank 1 ended in step 87 1 s ago, in gradient reduction (process 101 on h): ValueError: no"
        in told.sentence
    )
    told = found(beats, rank0="gone", rank1="gone")
    assert told.sentence == "no process of this run is left: it was in gradient reduction of step 87 1 s ago"


def test_of_dead_ranks_the_one_that_said_why_is_told():
    """Rank 0 died of rank 1's failure, and a little before it was noticed."""
    beats = [beat(0, 3, at=NOW - 9), beat(1, 3, at=NOW - 2, pid=77), beat(2, 3)]
    told = diagnose(beats, {0: "gone", 1: "gone", 2: "runs"}, NOW, {1: "ValueError: no"})
    assert told.ranks == (0, 1)
    assert "(process 77 on h): ValueError: no" in told.sentence


def test_a_silent_host():
    beats = [beat(0, 2, moved=NOW - 89), beat(1, 2, at=NOW - 90, moved=NOW - 91)]
    told = diagnose(beats, {0: "runs", 1: "elsewhere"}, NOW)
    assert told.ranks == (1,)
    assert "nothing was heard of it on h since 90 s" in told.sentence
    heard = [beats[0], replace(beats[1], at=NOW - 1)]
    assert "nothing was heard" not in diagnose(heard, {0: "runs", 1: "elsewhere"}, NOW).sentence


def test_health():
    assert found([]).sentence.startswith("no rank of this run has left a heartbeat")
    moving = [beat(rank, moved=NOW - 1, step_s=0.5) for rank in range(4)]
    assert found(moving) == Diagnosis(
        True, "4 ranks train: step 87, gradient reduction, 0.5 s a step", (), 87, REDUCING
    )
    ended = [beat(rank, phase="finished") for rank in range(4)]
    assert found(ended, rank0="gone").ok
    slow = [beat(rank, waits=rank < 3, step_s=60.0, groups=tp(rank, 412 - rank // 3)) for rank in range(4)]
    assert found(slow).ok  # steps that take a minute, and rank 3 is not there yet
    alike = [beat(rank, phase=COMPUTING, waits=False) for rank in range(4)]
    assert found(alike).ok  # they compute, and may for longer
    overdue = [replace(each, patience=30.0) for each in alike]
    assert not found(overdue).ok


@pytest.mark.parametrize(
    ("patience", "moved", "phase", "stalled"),
    [
        (30, 34, REDUCING, True),
        (600, 34, REDUCING, False),
        (0, 34, REDUCING, False),
        (30, 34, "finished", True),
    ],
)
def test_a_stall(patience, moved, phase, stalled):
    beats = [beat(0, 2, patience=30.0), beat(1, 2, patience=float(patience), moved=NOW - moved, phase=phase)]
    assert has_stalled(beats, NOW) is stalled
    assert not has_stalled([], NOW)


def test_a_straggler_is_named_and_not_those_that_wait_for_it():
    beats = [beat(rank, step_s=2.0, busy=0.9 if rank == 2 else 0.3) for rank in range(4)]
    ((rank, seconds, times),) = stragglers(beats)
    assert (rank, seconds, round(times, 6)) == (2, 1.8, 3.0)
    assert [rank for rank, *_ in stragglers(beats[1:3])] == [2]  # of two as well
    assert stragglers([replace(each, busy=0.3) for each in beats]) == []
    assert stragglers([replace(each, busy=None) for each in beats]) == []


beats_drawn = st.builds(
    lambda rank, step, phase, part, waits, counts, age: beat(
        rank,
        phase=phase,
        waits=waits,
        step=step,
        part=part,
        moved=NOW - age,
        groups={axis: group((0, 1, 2, 3), count, "all-reduce") for axis, count in counts.items()},
    ),
    st.integers(0, 3),
    st.integers(0, 9),
    st.sampled_from(PHASES),
    st.integers(0, 3),
    st.booleans(),
    st.dictionaries(st.sampled_from(["tp", "pp", "all ranks"]), st.integers(0, 5)),
    st.floats(0, 1000),
)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(beats_drawn, max_size=4, unique_by=lambda each: each.rank),
    st.lists(st.sampled_from(["runs", "stopped", "gone", "elsewhere"]), min_size=4, max_size=4),
    st.booleans(),
)
def test_there_is_always_one_sentence(beats, states, stalled):
    told = diagnose(beats, dict(enumerate(states)), NOW, stalled=stalled)
    assert told.sentence
    assert "\n" not in told.sentence
    assert told.ok or not beats or told.ranks
    assert set(told.ranks) <= set(range(4))


@settings(deadline=None)
@given(beats_drawn, st.sampled_from([(0, 1, 2, 3), (1, 3, 5, 7), (0, 1, 4, 5), (3,), (2, 6)]))
def test_a_beat_is_read_as_it_was_written(tmp_path_factory, one, ranks):
    one = replace(one, groups={"ep": Group(ranks, 3, {3: "all-to-all"})})
    path = tmp_path_factory.mktemp("beats") / "rank-00000"
    path.write_bytes(written(one) + b"the end of a longer one before\nend\n")
    assert read_beat(path) == one


def test_what_cannot_be_read_is_no_beat(tmp_path: Path):
    whole = written(beat(0))
    path = path_of(tmp_path, 0)
    path.parent.mkdir()
    for text in (
        b"",
        whole[:50],
        b"[]\nend\n",
        b"{}\nend\n",
        whole.replace(b"gradient reduction", b"tea"),
        b"\xff",
    ):
        path.write_bytes(text)
        assert read_beat(path) is None
        assert read_beats(tmp_path) == []
    assert read_beats(tmp_path / "nowhere") == []


def test_the_place_in_a_dump():
    dump = 'Thread 0x1 (most recent call first):\n  File "/a/b.py", line 3 in wait\n\n'
    dump += 'Current thread 0x2 (most recent call first):\n  File "/a/c.py", line 7 in spin\n'
    dump += '  File "/a/d.py", line 9 in f\n'
    assert innermost(dump) == "c.py:7 in spin"
    assert innermost("") == ""
