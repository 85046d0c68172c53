"""The run's folder is checked to be one and the same on all hosts, before anything is trained."""

import subprocess
import threading
import time
from pathlib import Path

import pytest

from fivefold.comm.world import World
from fivefold.training.ranks import run_ranks
from fivefold.training.shared_folder import check_shared, trouble


def seen_from(world: World, folders: list[Path], wait_s: float) -> list[str]:
    return [str(problem) for problem in check_shared(folders[world.rank], world.rank, wait_s)]


def several(world: World, cases: list[list[Path]]) -> list[list[str]]:
    return [seen_from(world, folders, 0.3) for folders in cases]


def test_ranks_that_see_another_folder_are_named(tmp_path):
    """Ranks with folders of their own stand for hosts that do not share a file system."""
    one, other, missing = tmp_path / "run", tmp_path / "other", tmp_path / "missing"
    one.mkdir()
    other.mkdir()
    cases = [[one, one, one], [one, one, other], [one, missing, one]]
    by_rank = run_ranks(several, 3, cases)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    fine, another, none = by_rank[0]
    assert fine == []
    host = __import__("socket").gethostname()
    assert another[0].startswith(
        f"run.folder: '{other}' on {host} is another folder than that of rank 0 on {host}"
    )
    assert none[0].startswith(
        f"run.folder: '{missing}' on {host} does not exist, but rank 0 on {host} writes"
    )
    assert all("shared file system: --run.folder" in text for text in (*another, *none))
    assert list(one.iterdir()) == list(other.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    """A file system of its own, so that it holds for every user."""
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("no permission to mount a file system")
    try:
        (tmp_path / "token").touch()
        assert trouble(tmp_path, "token", wait_s=0) is None
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        assert trouble(tmp_path, "token", wait_s=0) == "cannot be written to"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_may_come_late(tmp_path):
    def late() -> None:
        time.sleep(0.3)
        (tmp_path / "token").touch()

    writer = threading.Thread(target=late)
    writer.start()
    assert trouble(tmp_path, "token", wait_s=20) is None
    writer.join()
