"""Ranks as processes: what they return, how they fail, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fivefold.training.ranks
from fivefold.comm.world import World
from fivefold.config import load
from fivefold.problems import BadInput, Problem
from fivefold.training.failures import RanksFailed
from fivefold.training.launch import prepare, rank_count, run_ranks

# --- what the ranks run ------------------------------------------------------------------------------------


def total(world: World, addend: float) -> tuple[int, float]:
    ranks = torch.tensor([float(world.rank)], dtype=torch.float64)
    dist.all_reduce(ranks)
    return world.rank, ranks.item() + addend


def large(world: World) -> torch.Tensor:
    return torch.full((2_000_000,), world.rank)


def process_id(world: World) -> tuple[int, int, bool]:
    return os.getpid(), world.size, dist.is_initialized()


def leave_id(folder: Path, world: World) -> None:
    """Tell the test who runs; go on when all have, so that none is stopped before it could."""
    (folder / f"{world.rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{world.rank}.tmp").rename(folder / f"{world.rank}.pid")
    wait_for(folder, world.size)


def one_raises(world: World, folder: Path) -> None:
    leave_id(folder, world)
    if world.rank == 1:
        raise ArithmeticError("one too many")
    dist.all_reduce(torch.zeros(1))


def one_hangs_up_and_raises_later(world: World, folder: Path) -> None:
    leave_id(folder, world)
    if world.rank == 1:
        dist.destroy_process_group()
        time.sleep(1)
        raise ArithmeticError("one too many")
    dist.all_reduce(torch.zeros(1))


def one_is_killed(world: World, folder: Path) -> None:
    leave_id(folder, world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def one_exits(world: World, folder: Path) -> None:
    leave_id(folder, world)
    if world.rank == 1:
        os._exit(7)
    time.sleep(600)


def one_refuses(world: World, folder: Path) -> None:
    leave_id(folder, world)
    if world.rank == 1:
        raise BadInput([Problem("some.key", "is wrong", "Do it right.")])
    time.sleep(600)


def one_raises_while_another_will_not_end(world: World, folder: Path) -> None:
    if world.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leave_id(folder, world)
        time.sleep(600)
    leave_id(folder, world)
    raise ArithmeticError("one too many")


def unpicklable(world: World) -> object:
    return lambda: None


def wait_for_ever(world: World, folder: Path) -> None:
    leave_id(folder, world)
    time.sleep(600)


def wait_for(folder: Path, ranks: int) -> list[int]:
    """The process ids of the ranks, once all are there."""
    deadline = time.monotonic() + 120
    while len(found := sorted(folder.glob("*.pid"))) < ranks:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return [int(path.read_text()) for path in found]


def gone(ids: list[int], within: float = 30.0) -> bool:
    """Whether the processes end in time (a zombie has ended)."""

    def runs(process: int) -> bool:
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + within
    while any(map(runs, ids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# --- results -----------------------------------------------------------------------------------------------


def test_results_come_back_by_rank():
    assert run_ranks(total, 3, 0.5) == [(0, 3.5), (1, 3.5), (2, 3.5)]


def test_results_larger_than_a_pipe_come_back():
    assert [int(tensor[-1]) for tensor in run_ranks(large, 2)] == [0, 1]


def test_one_rank_runs_in_this_process_without_a_group():
    assert run_ranks(process_id, 1) == [(os.getpid(), 1, False)]


# --- failures ----------------------------------------------------------------------------------------------


def failed(function, folder: Path, ranks: int = 2) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(function, ranks, folder, errors=folder / "errors")
    assert gone(wait_for(folder, ranks), within=1)
    return caught.value


def test_the_rank_that_raised_is_told_first(tmp_path):
    error = failed(one_raises, tmp_path, ranks=3)
    assert str(error).startswith("rank 1 failed: ArithmeticError: one too many\n")
    assert "in one_raises" in str(error)
    record = json.loads((tmp_path / "errors" / "rank-1.json").read_text())
    assert (record["rank"], record["type"], record["message"]) == (1, "ArithmeticError", "one too many")
    assert abs(record["time"] - time.time()) < 60


def test_the_cause_is_told_before_an_error_that_came_earlier_but_only_follows_from_it(tmp_path):
    error = failed(one_hangs_up_and_raises_later, tmp_path)
    assert [(failure.rank, failure.is_echo) for failure in error.failures] == [(1, False), (0, True)]
    assert error.failures[0].time > error.failures[1].time
    assert str(error).startswith("rank 1 failed: ArithmeticError")
    assert str(error).endswith(f"see also {tmp_path / 'errors' / 'rank-0.json'}")


def test_a_killed_rank_is_told_with_its_signal(tmp_path):
    error = failed(one_is_killed, tmp_path)
    assert (error.failures[0].rank, "SIGKILL" in error.failures[0].message) == (1, True)
    assert "SIGKILL" in json.loads((tmp_path / "errors" / "rank-1.json").read_text())["message"]


def test_a_rank_that_exits_is_told_with_its_code(tmp_path):
    error = failed(one_exits, tmp_path)
    assert (error.failures[0].rank, "exit code 7" in error.failures[0].message) == (1, True)


def test_bad_input_in_a_rank_stays_bad_input(tmp_path):
    with pytest.raises(BadInput, match=r"some\.key: is wrong"):
        run_ranks(one_refuses, 2, tmp_path)
    assert gone(wait_for(tmp_path, 2), within=1)


def test_a_rank_that_ignores_being_asked_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(fivefold.training.ranks, "GRACE_S", 0.5)
    failed(one_raises_while_another_will_not_end, tmp_path)


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(unpicklable, 2)


def test_one_rank_leaves_its_error_too(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run_ranks(divide, 1, 0, errors=tmp_path)
    assert json.loads((tmp_path / "rank-0.json").read_text())["type"] == "ZeroDivisionError"


def divide(world: World, number: int) -> float:
    return 1 / number


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_ranks_do_not_outlive_the_process_that_started_them(tmp_path, number, code):
    script = """
        import sys
        from pathlib import Path
        from fivefold.training.launch import run_ranks
        from tests.training.test_launch import wait_for_ever

        run_ranks(wait_for_ever, 2, Path(sys.argv[1]))
    """
    root = Path(__file__).parents[2]
    starter = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], cwd=root)
    try:
        ranks = wait_for(tmp_path, 2)
        starter.send_signal(number)
        assert starter.wait(30) == code
        assert gone(ranks)
    finally:
        starter.kill()


# --- what happens before any rank starts -------------------------------------------------------------------


def test_rank_count():
    assert rank_count(load(), None, "cpu") == 1
    assert rank_count(load(), 3, "cpu") == 3
    degrees = ["--layout.dp_replicate=2", "--layout.dp_shard=3"]
    assert rank_count(load(None, None, degrees), None, "cpu") == 6
    assert rank_count(load(None, None, degrees), 4, "cpu") == 4


def test_more_ranks_than_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_count(load(), None, "cuda") == 2
    with pytest.raises(BadInput, match="3 ranks, but this machine has 2 GPUs"):
        rank_count(load(), 3, "cuda")
    with pytest.raises(BadInput, match="4 ranks, but this machine has 2 GPUs"):
        rank_count(load(None, None, ["--layout.dp_shard=4"]), None, "cuda")


def test_a_cpu_is_not_shared_by_a_thousand_ranks():
    """A job planned for a cluster, started on a laptop by mistake."""
    with pytest.raises(BadInput, match="layout: 8192 ranks, but this machine has"):
        rank_count(load(None, None, ["--layout.tp=8", "--layout.dp_shard=1024"]), None, "cpu")
    with pytest.raises(BadInput, match="--nproc: 100000 ranks"):
        rank_count(load(), 100_000, "cpu")


def test_prepare_writes_the_resolved_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = prepare(load(None, None, ["--data.source=random"]), 4, "cpu", None)
    assert start.folder.parent == tmp_path / "runs"
    assert start.folder.name.startswith("tiny-")
    assert load(str(start.folder / "job.toml")) == start.job
    assert (start.job.layout.dp_shard, start.job.training.micro_batch, start.attempt) == (4, 8, 1)
    again = prepare(load(str(start.folder / "job.toml")), 4, "cpu", None)
    assert again == start
    assert prepare(load(None, None, ["--data.source=random"]), 4, "cpu", None).folder != start.folder


def test_prepare_leaves_nothing_behind_when_it_refuses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["--data.source=missing.txt"], ["--training.seq_len=9999"], ["--run.wandb=x"]):
        with pytest.raises(BadInput):
            prepare(load(None, None, ["--data.source=random", *words]), 1, "cpu", None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"run\.folder: .*file"):
        prepare(load(None, None, ["--data.source=random"]), 1, "cpu", tmp_path / "file")
