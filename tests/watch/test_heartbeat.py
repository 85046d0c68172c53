"""A rank's heartbeat: what its thread writes, what is read of it, and what it must not keep."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.training import watching
from fivefold.watch import heartbeat
from fivefold.watch.beat import Beat, clear, path_of, read_beat, read_beats, stack_of, written
from fivefold.watch.doctor import REPORT, examine
from fivefold.watch.heartbeat import LOOK_S, Heartbeat

LEFT = Beat(0, 2, socket.gethostname(), os.getpid(), 1, 3, "optimizer", 0, moved=0.0, at=0.0, patience=0.0)
"""Of a process that is gone: its number is ours, but it was born when the machine started."""


class Gradient:
    """Something that a step holds in a variable."""


def _step() -> weakref.ref[Gradient]:
    held = Gradient()
    time.sleep(1.5 * LOOK_S)  # so that it is looked at in here
    return weakref.ref(held)


def test_what_a_step_held_goes_with_it(tmp_path: Path) -> None:
    """Kept until the next look, a step's gradients would lie beside those of the next one."""
    with Heartbeat(tmp_path, 0, 1):
        for _ in range(5):
            gone = _step()
            time.sleep(0.02)
            assert gone() is None


# --- what a rank tells ------------------------------------------------------------------------------------


class FailedError(Exception):
    """What ends a rank in the middle of a phase."""


def last_word(run: Path, life: Callable[[Heartbeat], object], stall_s: float = 0.0) -> Beat:
    """What a rank that lives so and then fails has told at the end."""
    with suppress(FailedError), Heartbeat(run, 0, 1, stall_s) as beats:
        life(beats)
        raise FailedError
    told = read_beat(path_of(run, 0))
    assert told is not None
    return told


def steps(beats: Heartbeat, count: int, phase: str = "optimizer") -> None:
    for step in range(1, count + 1):
        beats.begin(step)
        beats.tell(phase)


def test_a_rank_has_finished_only_if_it_did_not_fail(tmp_path: Path) -> None:
    told = last_word(tmp_path, lambda beats: steps(beats, 3))
    assert (told.step, told.phase) == (3, "optimizer")
    with Heartbeat(tmp_path, 0, 1) as beats:
        steps(beats, 3)
    done = read_beat(path_of(tmp_path, 0))
    assert done is not None
    assert (done.step, done.phase) == (3, "finished")


@pytest.mark.parametrize(
    ("count", "phase", "times"), [(1, "optimizer", 3), (4, "optimizer", 1), (4, "checkpoint", 3)]
)
def test_what_takes_long_in_one_piece_is_given_more_time(
    tmp_path: Path, count: int, phase: str, times: int
) -> None:
    assert last_word(tmp_path, lambda beats: steps(beats, count, phase), 600.0).patience == 600.0 * times


def test_the_first_step_which_compiles_is_no_pace(tmp_path: Path) -> None:
    assert last_word(tmp_path, lambda beats: steps(beats, 2)).step_s is None
    assert last_word(tmp_path, lambda beats: steps(beats, 3)).step_s is not None


def test_a_rank_that_waits_for_others_is_not_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LOOK_S", 0.005)
    there: dict[str, Callable[[float], None]] = {}
    source = "import time\ndef wait(seconds):\n    time.sleep(seconds)\n"
    exec(compile(source, str(Path("fivefold", "comm", "collectives.py")), "exec"), there)

    def life(beats: Heartbeat, act: Callable[[float], None]) -> None:
        steps(beats, 2)
        for part in range(1, 10):
            act(0.1)
            beats.tell("forward and backward", part)

    assert (last_word(tmp_path, lambda beats: life(beats, there["wait"])).busy or 0) < 0.5
    assert (last_word(tmp_path, lambda beats: life(beats, time.sleep)).busy or 0) > 0.5


# --- what is left of others --------------------------------------------------------------------------------


def leave(run: Path, *beats: Beat) -> None:
    for beat in beats:
        path_of(run, beat.rank).parent.mkdir(parents=True, exist_ok=True)
        path_of(run, beat.rank).write_bytes(written(beat))
    (run / "job.toml").touch()


def test_ranks_that_the_run_has_no_more_are_left_out(tmp_path: Path) -> None:
    leave(
        tmp_path, LEFT, replace(LEFT, rank=1), replace(LEFT, rank=2, ranks=4), replace(LEFT, rank=3, ranks=4)
    )
    assert [beat.rank for beat in read_beats(tmp_path)] == [0, 1]


def test_an_earlier_attempts_heartbeats_and_stacks_are_cleared(tmp_path: Path) -> None:
    leave(tmp_path, LEFT)
    stack_of(tmp_path, 0).touch()
    clear(tmp_path)
    assert read_beats(tmp_path) == []
    assert list((tmp_path / "heartbeats").iterdir()) == []


@pytest.mark.parametrize(("age", "told"), [(3600, False), (5, True)])
def test_what_a_rank_said_when_it_failed_is_told_but_not_what_one_before_it_said(
    tmp_path: Path, age: float, told: bool
) -> None:
    now = time.time()
    leave(tmp_path, replace(LEFT, ranks=1, at=now, moved=now))
    (tmp_path / "errors").mkdir()
    error = {"time": now - age, "type": "ValueError", "message": "no such thing\nand more"}
    (tmp_path / "errors" / "rank-0.json").write_text(json.dumps(error))
    sentence = examine(tmp_path).diagnosis.sentence
    assert sentence.startswith("no process of this run is left")
    assert sentence.endswith("ValueError: no such thing") is told


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_rank_that_speaks_leaves_a_report(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may look when the first has left already, and would say that it was to blame."""
    (tmp_path / "job.toml").touch()
    (tmp_path / "heartbeats").mkdir()
    for each in range(2):
        still = replace(LEFT, rank=each, at=time.time(), moved=time.time() - 9, patience=1.0)
        path_of(tmp_path, each).write_bytes(written(still))
    monkeypatch.setattr(watching, "SPEAKING_S", 0.0)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        watching._leave_if_stalled(tmp_path, rank)
    assert (tmp_path / REPORT).exists() == (rank == 0)
