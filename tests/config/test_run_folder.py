"""The two job files of a run's folder: what was asked for stays open, what runs is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config import Job, load, resolve
from fivefold.config.run_folder import job_files, ranks_before, ranks_had
from fivefold.problems import BadInput


def run_of(folder: Path, ranks: int, *words: str, device: str = "cpu") -> Job:
    """A run's folder as `train` leaves it; returns the job that was asked for."""
    asked = load(None, "tiny", [f"--run.folder={folder}", *words])
    folder.mkdir()
    for name, text in job_files(asked, resolve(asked, ranks, device)).items():  # type: ignore[arg-type]
        (folder / name).write_text(text)
    return asked


def test_a_run_goes_on_with_what_was_left_open_and_what_was_fixed(tmp_path: Path) -> None:
    run_of(tmp_path / "run", 4, "--layout.tp=2", "--training.steps=7")
    asked = load(str(tmp_path / "run"))
    assert (asked.layout.tp, asked.layout.dp_shard, asked.layout.zero) == (2, None, None)
    assert (asked.training.steps, asked.training.micro_batch) == (7, None)
    layout = resolve(asked, 8).layout
    assert (layout.tp, layout.dp_shard, layout.zero) == (2, 4, 3)
    assert load(str(tmp_path / "run"), None, ["--training.steps", "9"]).training.steps == 9


def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path: Path) -> None:
    run_of(tmp_path / "run", 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert load(str(tmp_path / "moved")).run.folder == str(tmp_path / "moved")


def test_a_run_keeps_its_precision_on_another_kind_of_device(tmp_path: Path) -> None:
    run_of(tmp_path / "run", 1, device="cuda")
    assert resolve(load(str(tmp_path / "run")), 1, "cpu").training.precision == "bf16"


@pytest.mark.parametrize("words", ["--layout.cp=2", "--layout.tp=2 --layout.pp=2", "--layout.dp_replicate=2"])
def test_a_run_goes_on_with_the_ranks_that_it_had(tmp_path: Path, words: str) -> None:
    folder = tmp_path / "run"
    asked = run_of(folder, 8, *words.split())
    assert ranks_had(folder) == ranks_before(folder, asked) == ranks_before(folder, load(str(folder))) == 8
    other = load(str(folder), None, ["--layout.zero=1"])
    assert ranks_before(folder, other) is None  # another layout may need other ranks
    assert ranks_before(None, asked) is None


def test_what_is_no_run_has_no_ranks(tmp_path: Path) -> None:
    assert ranks_had(tmp_path) is None
    (tmp_path / "job.toml").write_text("[layout\n")
    assert ranks_had(tmp_path) is None
    (tmp_path / "job.toml").unlink()
    with pytest.raises(BadInput, match=r"no job\.toml in it"):
        load(str(tmp_path))
