"""A task of SkyPilot, held to its fields, and its command run by a shell."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from fivefold.config import load
from fivefold.launching.gpus import Gpus
from fivefold.launching.machines import Launch
from fivefold.launching.skypilot import task
from fivefold.launching.storage import Storage
from tests.launching.schema import Optional, misfits

# Fields that we write, with their types, as SkyPilot has them in August 2026: `get_task_schema` and
# `get_resources_schema` in sky/utils/schemas.py.
TASK = {
    "name": str,
    "num_nodes": int,
    "workdir": str,
    "resources": {"accelerators": Optional(str), "job_recovery": {"max_restarts_on_errors": int}},
    "envs": {str: str},
    "volumes": Optional({str: str}),
    "file_mounts": Optional({str: {"source": str, "mode": str}}),
    "setup": Optional(str),
    "run": str,
}
JOB = load(None, "tiny", ["--run.folder=/shared/runs/x", "--data.source=it's $HOME.txt"])
LAUNCH = Launch(JOB, 3, 4, ["unused.toml"], env={"A": "b"}, port=1234)


H100S = Gpus(4, "H100")


def written(storage: str = "volume", gpus: Gpus = H100S, setup: str | None = "pip install .") -> Any:
    return yaml.safe_load(task(LAUNCH, gpus, Storage(storage, "/shared"), 7, ".", setup))


@pytest.mark.parametrize("storage", ["volume", "s3://bucket"])
@pytest.mark.parametrize(("gpus", "setup"), [(H100S, "pip install ."), (Gpus(0), None)])
def test_fields_are_those_of_a_task(storage, gpus, setup):
    assert misfits(written(storage, gpus, setup), TASK) == []


def test_what_is_asked_for():
    found = written()
    assert (found["name"], found["num_nodes"]) == ("x", 3)
    assert found["resources"] == {"accelerators": "H100:4", "job_recovery": {"max_restarts_on_errors": 7}}
    assert found["volumes"] == {"/shared": "volume"}
    assert found["envs"]["A"] == "b"
    assert written("s3://bucket")["file_mounts"] == {"/shared": {"source": "s3://bucket", "mode": "MOUNT"}}


def test_each_machine_runs_the_whole_job_and_meets_at_the_first(tmp_path):
    (tmp_path / "python").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / "python").chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
        "SKYPILOT_NODE_RANK": "2",
    }
    done = subprocess.run(["bash", "-c", written()["run"]], env=env, capture_output=True, text=True)
    words = done.stdout.splitlines()
    assert "--rdzv-endpoint=10.0.0.1:1234" in words
    assert "--local-addr=10.0.0.3" in words
    assert {"--nnodes=3", "--rdzv-conf=is_host=false"} <= set(words)
    assert load(None, None, words[words.index("train") + 1 :]) == JOB
