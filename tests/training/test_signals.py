"""Signals at any moment of a run: it saves, or has nothing to save; no process stays; exit codes say it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.storage.folder import saved_steps
from fivefold.training.samples import read_samples
from fivefold.training.stopping import ONE_REQUEST_S, Stopped, listening
from tests.soak.moments import all_gone, ranks_of
from tests.training.test_stopping import LONG, SMALL

Moment = Callable[[Path, subprocess.Popen[str]], bool]


def begin(folder: Path, ranks: int, *more: str) -> subprocess.Popen[str]:
    """A run in a process group of its own, with its cache and its output beside its folder."""
    words = ("--nproc", str(ranks), "--run", str(folder), "--training.steps", str(LONG))
    return launch([sys.executable, "-m", "fivefold", "train", *SMALL, *words, *more])


def launch(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def await_moment(moment: Moment, folder: Path, run: subprocess.Popen[str]) -> list[int]:
    """Wait for it; the processes of the run that are there then."""
    while not moment(folder, run):
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.005)
    return [run.pid, *ranks_of(run.pid)]


def ended_well(folder: Path, run: subprocess.Popen[str], number: int, there: list[int]) -> str:
    """What a run said that was asked to stop: all that it trained is saved, or there is nothing to save."""
    told = run.communicate(timeout=90)[0]
    trained, saved = read_samples(folder), saved_steps(folder)
    if run.returncode == 0:
        assert saved, told
        assert f"To go on: fivefold train {folder}" in told
        assert trained[-1].step == saved[-1]
    else:
        assert run.returncode == 128 + number, told
        assert not saved
    assert "Traceback" not in told, told
    assert all_gone(there)
    assert not (folder / "writer.lock").exists()
    return told


def reached(step: int) -> Moment:
    return lambda folder, run: len(read_samples(folder)) >= step


def saving(folder: Path, run: subprocess.Popen[str]) -> bool:
    return any((folder / "checkpoints").glob("*.partial"))


def ranks_start(folder: Path, run: subprocess.Popen[str]) -> bool:
    return (folder / "job.toml").exists()


def ranks_are_there(folder: Path, run: subprocess.Popen[str]) -> bool:
    return len(ranks_of(run.pid)) == 2


def building(folder: Path, run: subprocess.Popen[str]) -> bool:
    return any(folder.parent.glob("cache/*.partial-*"))


def ask(run: subprocess.Popen[str], number: signal.Signals, everyone: bool) -> None:
    """Signal the process that was started, or all of its group as a terminal and a scheduler do."""
    (os.killpg if everyone else os.kill)(run.pid, number)


ENDLESS = ("--training.validate_every", "2", "--training.validate_batches", str(LONG))
OFTEN = ("--checkpoint.every", "1")
slow = pytest.mark.slow
CASES = [
    pytest.param("validation", 2, signal.SIGTERM, True, ENDLESS, reached(2), marks=slow),
    pytest.param("validation", 1, signal.SIGUSR1, False, ENDLESS, reached(2), marks=slow),
    pytest.param("start of ranks", 2, signal.SIGINT, True, (), ranks_start, marks=slow),
    pytest.param("warm-up", 2, signal.SIGTERM, True, (), ranks_are_there, marks=slow),
    pytest.param("warm-up", 1, signal.SIGINT, False, (), ranks_start, marks=slow),
    pytest.param("save", 2, signal.SIGINT, True, OFTEN, saving, marks=slow),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("where", "ranks", "number", "everyone", "more", "moment"), CASES)
def test_a_signal_at_any_moment(
    tmp_path: Path,
    where: str,
    ranks: int,
    number: signal.Signals,
    everyone: bool,
    more: tuple[str, ...],
    moment: Moment,
) -> None:
    folder = tmp_path / "run"
    run = begin(folder, ranks, *more)
    there = await_moment(moment, folder, run)
    ask(run, number, everyone)
    told = ended_well(folder, run, number, there)
    if where in ("validation", "save"):
        assert run.returncode == 0, told


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=slow)])
def test_a_signal_while_data_is_built_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    folder, text = tmp_path / "run", tmp_path / "text"
    text.write_bytes(b"all work and no play\n" * (3 << 19))
    data = ("--data.source", str(text), "--data.cache", str(tmp_path / "cache"))
    run = begin(folder, 2, *data)
    there = await_moment(building, folder, run)
    ask(run, number, everyone=True)
    told = ended_well(folder, run, number, there)
    assert run.returncode == 128 + number
    assert "stopped" in told
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []
    assert not folder.exists()


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_signal_while_blocks_are_compiled(tmp_path: Path, resumed: bool) -> None:
    """It is heard after the first step, or after 15 seconds; with a checkpoint nothing is lost by it."""
    folder = tmp_path / "run"
    if resumed:
        run = begin(folder, 1)
        await_moment(reached(2), folder, run)
        ask(run, signal.SIGTERM, everyone=False)
        ended_well(folder, run, signal.SIGTERM, [])
    before = len(read_samples(folder))
    run = begin(folder, 1, "--training.compile", "true", "--model.layers", "2")
    time.sleep(1)
    there = await_moment(lambda folder, run: (folder / "writer.lock").exists(), folder, run)
    time.sleep(1)
    ask(run, signal.SIGTERM, everyone=True)
    ended_well(folder, run, signal.SIGTERM, there)
    if resumed:
        assert run.returncode == 0
        assert len(read_samples(folder)) >= before


@slow
@pytest.mark.timeout(300)
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """Also a run that cannot come to the end of a step, because a rank of it stands still."""
    folder = tmp_path / "run"
    run = begin(folder, 2, *OFTEN)
    there = await_moment(reached(3), folder, run)
    os.kill(there[-1], signal.SIGSTOP)
    ask(run, signal.SIGTERM, everyone=False)
    time.sleep(1.5)
    ask(run, signal.SIGTERM, everyone=False)
    told = run.communicate(timeout=60)[0]
    assert "stopped by SIGTERM: the checkpoint of step" in told
    assert "To go on: fivefold train" in told
    assert run.returncode in (0, 143)  # 0 where no step was taken since the last checkpoint
    assert all_gone(there)


@slow
@pytest.mark.timeout(300)
def test_under_torchrun_a_signal_saves_and_stops_all(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--training.steps", str(LONG), "--run.folder", str(folder))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = launch([*start, "-m", "fivefold", "train", *SMALL, *words])
    await_moment(reached(3), folder, run)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    ask(run, signal.SIGTERM, everyone=False)
    told = run.communicate(timeout=90)[0]
    assert "To go on: fivefold train" in told
    assert read_samples(folder)[-1].step == saved_steps(folder)[-1]
    assert all_gone([run.pid, *map(int, children)])


def test_a_second_signal_in_a_destructor_stops_behind_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Python drops what is raised there; a compiler has many such places."""

    class Interrupted:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def interrupted_long_after_a_request() -> None:
        with listening() as request:
            request.receive(signal.SIGTERM, None)
            request._at -= 2 * ONE_REQUEST_S
            Interrupted()
            time.sleep(30)

    with pytest.raises(Stopped) as stopped:
        interrupted_long_after_a_request()
    assert stopped.value.signal == signal.SIGTERM
    assert "Stopped" not in "".join(capfd.readouterr())
