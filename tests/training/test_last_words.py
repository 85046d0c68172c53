"""What is said of a run that a signal ended, and what the next run waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fivefold.problems import BadInput
from fivefold.storage import lock
from fivefold.storage.folder import being_written
from fivefold.storage.lock import in_use, locked
from fivefold.training.last_words import last_words
from fivefold.training.samples import SampleLog
from fivefold.training.stopping import Stopped, StopRequest, leaving, listening


@pytest.mark.parametrize(
    ("saved", "logged", "code", "told"),
    [
        (None, [], 143, "nothing was saved"),
        (None, [(1, 3)], 143, "nothing was saved"),
        (4, [(1, 4)], 0, "the checkpoint of step 4 stands, and nothing was lost. To go on: fivefold train"),
        (4, [(1, 6)], 0, "the checkpoint of step 4 stands, and nothing was lost"),  # lost before this attempt
        (4, [(1, 5), (2, 6)], 143, "the checkpoint of step 4 stands; steps since then that are lost: 2"),
    ],
)
def test_what_stands_is_said_and_nothing_lost_is_no_failure(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    saved: int | None,
    logged: list[tuple[int, int]],
    code: int,
    told: str,
) -> None:
    if saved is not None:
        (tmp_path / "checkpoints" / f"step-{saved}").mkdir(parents=True)
    for attempt, step in logged:
        SampleLog(tmp_path, attempt).write(step, 0, 1, 0)
    with pytest.raises(Stopped) as stopped, last_words(tmp_path, attempt=2):
        raise Stopped(signal.SIGTERM)
    assert stopped.value.told
    assert stopped.value.code == code
    assert f"stopped by SIGTERM: {told}" in capsys.readouterr().err


def test_the_next_run_waits_for_ranks_of_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, ended = threading.Event(), threading.Event()

    def rank() -> None:
        with in_use(tmp_path):
            held.set()
            time.sleep(0.3)
            ended.set()

    other = threading.Thread(target=rank)
    other.start()
    held.wait()
    with locked(tmp_path):
        assert ended.is_set()
    other.join()
    monkeypatch.setattr(lock, "RANKS_GONE_S", 0.1)
    with (
        in_use(tmp_path),
        pytest.raises(BadInput, match="ranks of an earlier run still write"),
        locked(tmp_path),
    ):
        pass


def test_a_save_is_under_way_as_long_as_its_files_change(tmp_path: Path) -> None:
    assert not being_written(tmp_path)
    partial = tmp_path / "checkpoints" / "step-3.partial"
    partial.mkdir(parents=True)
    file = partial / "rank-00000.safetensors"
    file.write_text("")
    assert being_written(tmp_path)
    for path in (partial, file):
        os.utime(path, (0, time.time() - 3600))
    assert not being_written(tmp_path)


def test_a_request_is_noted_handed_over_and_counts_twice_after_its_limit() -> None:
    with listening() as first:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # within a second: the same request
        with listening(limit=1.2) as second:
            assert second.signal == first.signal == signal.SIGTERM
            with pytest.raises(Stopped) as stopped:
                time.sleep(30)
            assert stopped.value.code == 143


def test_what_is_passed_on_late_is_not_a_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    request = StopRequest()
    request.receive(signal.SIGTERM, None)
    monkeypatch.setattr("fivefold.training.stopping.ONE_REQUEST_S", 0.0)
    request.receive(signal.SIGUSR1, None)
    with pytest.raises(Stopped):
        request.receive(signal.SIGTERM, None)


def test_before_there_is_anything_to_save_a_signal_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped), leaving():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
