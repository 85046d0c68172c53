"""What changes the numbers is used only where it is allowed, and only where it pays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.axes.checks import check
from fivefold.cli import app
from fivefold.config import load, resolve
from fivefold.planner.allowed import CHOICES, LOCAL_STEPS, PAYS, fastest
from fivefold.planner.request import Request
from fivefold.problems import BadInput

LINKS = """
name = "two-servers"
device = "H100 SXM"
[[levels]]
name = "server"
devices = 2
bandwidth = 450e9
latency = 3e-6
[[levels]]
name = "cluster"
devices = "unlimited"
bandwidth = {bandwidth}
latency = 50e-6
"""
ONLY_DATA = {"layout.pp": 1, "layout.cp": 1, "layout.tp": 1, "training.recompute": "none"}
SLOW, FAST = 0.1e9, 100e9


def cluster(folder: Path, bandwidth: float) -> str:
    path = folder / f"{bandwidth:g}.toml"
    path.write_text(LINKS.format(bandwidth=bandwidth))
    return str(path)


def asked(folder: Path, bandwidth: float, **given: Any) -> Request:
    usual: dict[str, Any] = {"model": "gpt2", "hf": None, "gpus": 4, "global_batch": 64, "keys": ONLY_DATA}
    return Request(cluster=cluster(folder, bandwidth), **(usual | given))


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_it_pays_on_slow_links_and_not_on_fast_ones(name: str, tmp_path: Path) -> None:
    for bandwidth, pays in ((SLOW, True), (FAST, False)):
        request = asked(tmp_path, bandwidth, allow=name)
        answer = request.answer()
        (variant,) = request.allowed(answer)
        assert variant.pays is pays
        assert variant.gain is not None
        assert (variant.gain >= PAYS) is pays
        words = variant.sentence(answer)
        assert words.startswith(f"{name} pays" if pays else f"{name} does not pay")


def test_local_steps_send_a_twentieth(tmp_path: Path) -> None:
    """Where messages are nearly all of a step, nearly so many times as fast; the written job says so."""
    request = asked(tmp_path, SLOW / 10, allow="local", tokens="1B")
    answer = request.answer()
    (variant,) = request.allowed(answer)
    assert variant.gain is not None
    assert 3 < variant.gain <= LOCAL_STEPS
    found, keys = fastest(answer, [variant])
    job = request.job(found, keys)
    assert job.communication.local_steps == LOCAL_STEPS
    assert job.training.steps % LOCAL_STEPS == 0
    assert check(resolve(job, 4, "cuda")) == []


def test_8_bits_gain_more_than_16_and_not_more_than_their_bytes(tmp_path: Path) -> None:
    request = asked(tmp_path, SLOW, allow="int8,bf16")
    eight, sixteen = request.allowed(request.answer())
    assert eight.gain is not None
    assert sixteen.gain is not None
    assert 1.5 < sixteen.gain <= 2 < eight.gain < 4


def test_sums_are_compressed_where_that_is_fastest(tmp_path: Path) -> None:
    keys = ONLY_DATA | {"layout.dp_replicate": 2, "layout.dp_shard": 2, "layout.zero": 3}
    request = asked(tmp_path, SLOW, allow="int8", keys=keys)
    (variant,) = request.allowed(request.answer())
    seconds = {}
    for where in ("all", "replicate"):
        fixed = {"communication.compress": "int8", "communication.compress_on": where}
        best = asked(tmp_path, SLOW, keys=keys | fixed).answer().best
        assert best is not None
        seconds[where] = best.step_time
    assert abs(seconds["all"] / seconds["replicate"] - 1) > 1e-3
    assert variant.answer.best is not None
    assert variant.answer.best.step_time == pytest.approx(min(seconds.values()), rel=1e-9)
    assert variant.settings.get("compress_on", "all") == min(seconds, key=lambda where: seconds[where])


def test_the_written_job_has_it_only_where_it_pays(tmp_path: Path) -> None:
    for bandwidth, kind in ((SLOW, "int8"), (FAST, "none")):
        out = tmp_path / "job.toml"
        words = [
            "plan",
            "--model",
            "gpt2",
            "--gpus",
            "4",
            "--global-batch",
            "64",
            "--allow",
            "int8",
            "--json",
        ]
        words += ["--cluster", cluster(tmp_path, bandwidth), "--out", str(out), "--json"]
        words += [f"--{key}={value}" for key, value in ONLY_DATA.items()]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)["allowed"]["int8"]
        assert told["pays"] is (kind == "int8")
        assert told["best"]["step_time_s"] > 0
        assert load(str(out)).communication.compress == kind


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--allow: 'int4' is not known\n    Did you mean 'int8'") as caught:
        asked(tmp_path, SLOW, allow="int4")
    assert "--allow" in str(caught.value)
    keys = ONLY_DATA | {"communication.compress": "bf16"}
    with pytest.raises(BadInput, match="'int8', but --communication"):
        asked(tmp_path, SLOW, allow="int8", keys=keys)
