"""`fivefold doctor RUN`: what it prints, and with which code it ends."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.watch.beat import Beat, path_of, written
from fivefold.watch.processes import born
from tests.commands.typed import typed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one rank, this process, which trains."""
    now = time.time()
    place = (3, "optimizer", 0)
    beat = Beat(0, 1, socket.gethostname(), os.getpid(), born(os.getpid()), *place, now, now, patience=600.0)
    path_of(tmp_path, 0).parent.mkdir()
    path_of(tmp_path, 0).write_bytes(written(beat))
    path_of(tmp_path, 1).write_bytes(written(replace(beat, rank=1)))  # of more ranks, earlier
    (tmp_path / "job.toml").touch()
    return tmp_path


def test_a_run_that_trains_is_no_bad_news(run: Path) -> None:
    shown = typed("doctor", str(run))
    assert shown.exit_code == 0
    assert shown.stdout.startswith("1 rank trains: step 3, optimizer\n")
    told = typed("doctor", str(run), "--json")
    assert told.exit_code == 0
    assert json.loads(told.stdout)["ok"] is True


def test_a_run_whose_rank_is_gone_is_bad_news(run: Path) -> None:
    beat = path_of(run, 0).read_bytes().replace(f'"born": {born(os.getpid())}'.encode(), b'"born": 1')
    path_of(run, 0).write_bytes(beat)
    for words in ([], ["--json"]):
        told = typed("doctor", str(run), *words)
        assert told.exit_code == 1
        assert "no process of this run is left: it was in optimizer of step 3" in told.stdout
    assert json.loads(told.stdout)["ranks"] == [0]


def test_what_is_no_run_is_bad_input(tmp_path: Path) -> None:
    told = typed("doctor", str(tmp_path), "--json")
    assert told.exit_code == 2
    assert json.loads(told.stdout)["problems"][0]["key"] == "RUN"
