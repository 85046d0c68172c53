"""The log of a run: what is written, and what can be read back after a kill."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from io import StringIO

import torch
from rich.console import Console

from fivefold.config import load
from fivefold.training.metrics import MetricsLog, check_loggers, next_attempt, peak_memory_gib, read_metrics
from fivefold.training.ranks import run_ranks
from fivefold.training.run import Summary
from fivefold.training.terminal import Display, duration

QUIET = load(None, None, ["--run.tensorboard=false", "--training.steps=4"])


def record(step, **more):
    names = "loss grad_norm lr step_time_s tokens_per_s tokens_per_s_per_device memory_gib"
    figures = dict.fromkeys(names.split(), 0.1)
    return {"step": step, "tokens": 64 * step, "mfu": None, "hfu": None, **figures, **more}


def test_numbers_keep_full_precision_and_nan_is_null(tmp_path):
    loss = 1 / 3 * math.pi
    with MetricsLog(tmp_path, 1, QUIET) as log:
        log.write(record(1, loss=loss, grad_norm=math.inf, lr=math.nan))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["loss"], found["grad_norm"], found["lr"], found["attempt"]) == (loss, None, None, 1)


def test_a_line_is_in_the_file_before_the_next_step(tmp_path):
    with MetricsLog(tmp_path, 1, QUIET) as log:
        for step in (1, 2, 3):
            log.write(record(step))
            assert len(read_metrics(tmp_path)) == step


def test_the_last_line_of_a_step_counts(tmp_path):
    with MetricsLog(tmp_path, 1, QUIET) as log:
        for step in (1, 2, 3):
            log.write(record(step, loss=1.0))
    with MetricsLog(tmp_path, next_attempt(tmp_path), QUIET) as log:
        log.write(record(2, loss=2.0))
    found = read_metrics(tmp_path)
    assert [line["loss"] for line in found] == [1.0, 2.0, 1.0]
    assert [line["attempt"] for line in found] == [1, 2, 1]
    assert next_attempt(tmp_path) == 3


def test_a_torn_line_is_skipped_and_does_not_swallow_the_next(tmp_path):
    with MetricsLog(tmp_path, 1, QUIET) as log:
        log.write(record(1))
        log.write(record(2))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    with MetricsLog(tmp_path, 2, QUIET) as log:
        log.write(record(2, loss=7.0))
    assert [line["loss"] for line in read_metrics(tmp_path)] == [0.1, 7.0]


def test_a_killed_process_loses_no_line_it_had_written(tmp_path):
    script = """
        import os, signal, sys
        from pathlib import Path
        from fivefold.config import load
        from fivefold.training.metrics import MetricsLog

        log = MetricsLog(Path(sys.argv[1]), 1, load(None, None, ["--run.tensorboard=false"]))
        for step in range(1, 51):
            log.write({"step": step})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)])
    assert ended.returncode == -signal.SIGKILL
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 51))


def test_no_file_is_no_records(tmp_path):
    assert read_metrics(tmp_path) == []
    assert next_attempt(tmp_path) == 1


def test_tensorboard_events_are_written(tmp_path):
    with MetricsLog(tmp_path, 1, load()) as log:
        log.write(record(5, val_loss=2.5))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"val_loss" in events.read_bytes()
    assert b"mfu" not in events.read_bytes()


def test_wandb_that_is_not_installed_is_refused_before_the_start():
    job = load(None, None, ["--run.wandb=project"])
    assert check_loggers(load().run) == []
    if find_spec("wandb") is None:
        assert [problem.key for problem in check_loggers(job.run)] == ["run.wandb"]


def half_a_gib_more(world):
    before = peak_memory_gib(world.device)
    held = torch.ones(2**27)  # of 4 bytes
    return peak_memory_gib(world.device) - before, held[-1].item()


def test_peak_memory_grows_with_what_is_held():
    for grown, _ in run_ranks(half_a_gib_more, 2):
        assert 0.45 < grown < 0.6


def test_plain_lines_when_there_is_no_terminal():
    out = StringIO()
    display = Display(Console(file=out, width=200, force_terminal=False))
    display.start(QUIET, {"layout": "one process", "folder": "[runs]/x", "step": 0})
    for step in (1, 2, 3, 4):
        display.step(record(step, **({"val_loss": 3.25} if step == 2 else {}), mfu=0.4))
    display.finish(Summary(4, 0.1, 3.25, 256, 3725.0, "runs/x"))
    lines = out.getvalue().splitlines()
    assert "[runs]/x" in lines[0]
    assert [line.split()[1] for line in lines[1:-1]] == ["1/4", "2/4", "4/4"]  # the third came too soon
    assert "held-out 3.25" in lines[2]
    assert "MFU 40.0%" in lines[1]
    assert "256 tokens in 1:02:05" in lines[-1]
    assert "\x1b" not in out.getvalue()


def test_a_progress_bar_on_a_terminal():
    out = StringIO()
    display = Display(Console(file=out, width=200, force_terminal=True))
    display.start(QUIET, {"step": 2})
    display.step(record(3, loss=1.2345))
    display.finish(Summary(4, 0.1, None, 256, 1.0, "runs/x"))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "3/4" in shown
    assert "loss 1.2345" in shown
    assert "MFU" not in shown


def test_duration():
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
