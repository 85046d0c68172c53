"""Machines x ranks, and what every machine runs."""

from __future__ import annotations

import pytest

from fivefold.config import load
from fivefold.launching.gpus import Gpus, read_gpus
from fivefold.launching.machines import Launch, check_fits, read_env, spread, with_folder
from fivefold.launching.storage import Storage, on_storage, read_storage
from fivefold.problems import BadInput


def job(*settings: str):
    return load(None, "tiny", list(settings))


@pytest.mark.parametrize(
    ("layout", "nodes", "ranks", "found"),
    [
        ((), 2, 4, (2, 4)),
        (("--layout.dp_shard=8",), 2, None, (2, 4)),
        (("--layout.dp_shard=2", "--layout.tp=4"), None, 4, (2, 4)),
    ],
)
def test_what_is_left_out_follows_from_the_layout(layout, nodes, ranks, found):
    assert spread(job(*layout), nodes, ranks) == found


@pytest.mark.parametrize(
    ("layout", "nodes", "ranks", "said"),
    [
        ((), 2, None, "--nproc-per-node: is not given, and the job's layout says nothing of ranks"),
        ((), None, 8, "--nodes: is not given, and the job's layout says nothing of ranks"),
        (("--layout.dp_shard=8",), 3, None, "makes 8 ranks: no multiple of 3"),
        (("--layout.dp_shard=8",), None, None, "--nodes: is not given"),
        ((), 0, 8, "--nodes: 0 is out of range"),
        ((), 2, -1, "--nproc-per-node: -1 is out of range"),
    ],
)
def test_what_does_not_follow_is_asked_for(layout, nodes, ranks, said):
    with pytest.raises(BadInput, match=said):
        spread(job(*layout), nodes, ranks)


def test_a_layout_that_does_not_fit_is_refused_in_words_of_machines():
    with pytest.raises(BadInput) as refused:
        check_fits(job("--layout.dp_shard=4"), 2, 3, "cuda")
    assert "makes 4, but there are 6 ranks (2 machines x 3 ranks)" in str(refused.value)
    assert "machines x --nproc-per-node = 4" in str(refused.value)
    check_fits(job("--layout.dp_shard=4"), 2, 2, "cuda")


def test_the_rules_of_axes_count_and_the_planner_s_layouts_wait():
    with pytest.raises(BadInput, match=r"layout\.tp"):
        check_fits(job("--layout.tp=3", "--training.global_batch=6"), 3, 2, "cuda")
    check_fits(job("--layout.auto=true"), 3, 2, "cuda")


def test_a_run_gets_a_folder_once():
    named, words = with_folder(job("--run.folder=runs/x"), None)
    assert (named.run.folder, words) == ("runs/x", [])
    named, words = with_folder(job("--run.folder=runs/x"), "other")
    assert (named.run.folder, words) == ("other", ["--run.folder=other"])
    named, words = with_folder(job(), None)
    assert str(named.run.folder).startswith("runs/tiny-")
    assert words == [f"--run.folder={named.run.folder}"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("runs/Big_Run.2", "big-run-2"),
        ("/shared/7b", "run-7b"),
        ("runs/" + "x" * 80, "x" * 50),
        ("..", "run"),
    ],
)
def test_names_are_labels_of_dns(folder, name):
    asked = job(f"--run.folder={folder}")
    assert Launch(asked, 2, 2, []).name == name


@pytest.mark.parametrize(
    ("text", "found"), [(None, Gpus(4)), ("8", Gpus(8)), ("H100:8", Gpus(8, "H100")), ("0", Gpus(0))]
)
def test_gpus(text, found):
    assert read_gpus(text, 4) == found


@pytest.mark.parametrize("text", ["", "H100", "-1", "a b:2", "2"])
def test_gpus_that_are_none_or_too_few(text):
    with pytest.raises(BadInput, match="--gpus"):
        read_gpus(text, 4)


def test_variables():
    assert read_env(["A=1", "B_2=x=y z", "C="]) == {"A": "1", "B_2": "x=y z", "C": ""}
    for wrong in ("A", "=1", "1A=2", "A=x\ny"):
        with pytest.raises(BadInput, match="--env"):
            read_env([wrong])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("claim", Storage("claim", "/shared")),
        ("claim:/data/", Storage("claim", "/data")),
        ("s3://bucket", Storage("s3://bucket", "/shared")),
        ("s3://bucket:/data", Storage("s3://bucket", "/data")),
    ],
)
def test_storage(text, found):
    assert read_storage(text) == found


@pytest.mark.parametrize("text", [None, "", ":/data"])
def test_storage_must_be_named(text):
    with pytest.raises(BadInput, match="--storage"):
        read_storage(text)


def test_a_run_s_folder_is_on_the_storage():
    storage = Storage("claim", "/data")
    assert on_storage(job("--run.folder=runs/x"), storage).run.folder == "/data/runs/x"
    assert on_storage(job("--run.folder=/data/x"), storage).run.folder == "/data/x"
    with pytest.raises(BadInput, match="'/elsewhere/x' is not on the storage"):
        on_storage(job("--run.folder=/elsewhere/x"), storage)
