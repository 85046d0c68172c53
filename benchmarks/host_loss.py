"""Two hosts of two ranks train; one of them is lost in the middle.

An elastic job goes on with the ranks that are left: its losses are those of one process never stopped. A
job that is not elastic waits for the host: when it is back, the run ends with the weights of one unharmed.
The lost host is that of rank 0, which had the lock of the run's folder.

    python -m benchmarks.hosts --show-loss-of-a-host
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from benchmarks.hosts import Host, NoHostsError, environment, hosts, torchrun
from fivefold.config.run_folder import ranks_had
from fivefold.training.metrics import read_metrics

JOB = """
[model]
preset = "tiny"
layers = 2
dim = 32
heads = 4
kv_heads = 4
ffn = 64

[data]
source = "random"

[training]
steps = 24
global_batch = 8
seq_len = 16
precision = "fp64"

[layout]
dp_shard = 4

[checkpoint]
every = 4

[run]
tensorboard = false
"""
STEPS, LOST_AFTER = 24, 10
QUICK = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=2"
"""How soon torchrun takes a host for lost (3 intervals), and how long it then waits for more to come."""


def train_alone(folder: Path, name: str, *settings: str) -> Path:
    """The run that nothing happens to, on this machine."""
    words = [
        sys.executable,
        "-m",
        "fivefold",
        "train",
        str(_job(folder)),
        "--run",
        str(folder / name),
        *settings,
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return folder / name


def train_and_lose_a_host(
    folder: Path, elastic: bool, silently: bool = False, patience_s: float = 300.0
) -> Path:
    """The run that loses its first host; an elastic one for good, another until ranks have noticed.

    silently  the link goes first, so that no message says that the processes are gone
    """
    run = folder / ("elastic" if elastic else "waiting")
    words = ["-m", "fivefold", "train", str(_job(folder)), "--run.folder", str(run)]
    words += ["--resilience.elastic", str(elastic).lower()]
    with hosts(2) as [first, second], (folder / f"{run.name}.log").open("w") as log:

        def start(host: Host, log: IO[str]) -> "subprocess.Popen[str]":
            nnodes = "1:2" if elastic else "2"
            begin = torchrun(host, second, nnodes, 2, "--max-restarts=3", QUICK)
            return host.start([*begin, *words], env=environment(), stdout=log, stderr=log, text=True)

        start(first, log)
        left = start(second, log)
        _until(lambda: _steps(run) >= LOST_AFTER, patience_s, log)
        if silently:
            first.cut()
        first.kill()
        if not elastic:
            _until(lambda: any((run / "errors").glob("rank-*.json")), patience_s, log)
            first.bring_back()
            start(first, log)
        if left.wait(patience_s) != 0:
            raise RuntimeError(Path(log.name).read_text())
    return run


def train_until_the_link_drops(folder: Path, *settings: str, patience_s: float = 300.0) -> tuple[Path, str]:
    """Two hosts of a rank; the link of the second goes down in the middle, and all processes live on.

    Returns the run, when its ranks have stopped on both, and what was printed on the first.
    """
    run, steps = folder / "dropped", 100 * STEPS
    words = ["-m", "fivefold", "train", str(_job(folder)), "--run.folder", str(run), "--layout.dp_shard", "1"]
    words += ["--layout.dp_replicate", "2", "--training.steps", str(steps)]
    words += ["--checkpoint.keep", "0", *settings]  # else a checkpoint is what the silence meets
    with (
        hosts(2) as made,
        (folder / "first.log").open("w") as log,
        (folder / "second.log").open("w") as other,
    ):
        started = [
            host.start(
                [*torchrun(host, made[0], "2", 1), *words], env=environment(), stdout=file, stderr=file
            )
            for host, file in zip(made, (log, other), strict=True)
        ]
        _until(lambda: _steps(run) >= LOST_AFTER, patience_s, log)
        made[1].cut()
        # The ranks of both end; torchrun on the host that is cut off waits for the place where hosts meet.
        _until(lambda: len([*(run / "errors").glob("rank-*.json")]) == 2, patience_s, log)
        code, printed = started[0].wait(patience_s), Path(log.name).read_text()
        if code == 0 or _steps(run) >= steps:
            raise RuntimeError(printed)
    return run, printed


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run)]


def attempts(run: Path) -> int:
    return max(int(line["attempt"]) for line in read_metrics(run))


def final_files(run: Path) -> dict[str, str]:
    """The checksums of what the last checkpoint holds, file by file."""
    manifest = json.loads((run / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())
    return {name: file["checksum"] for name, file in manifest["files"].items()}


def largest_difference(run: Path, other: Path) -> float:
    return max(abs(mine - theirs) for mine, theirs in zip(losses(run), losses(other), strict=True))


def show() -> int:
    """Both cases, with what came of them; 0 if all is as it should be."""
    with tempfile.TemporaryDirectory(prefix="fivefold-") as name:
        folder = Path(name)
        print(f"two hosts of 2 ranks; the one of rank 0 is lost after step {LOST_AFTER} of {STEPS}")
        try:
            run = train_and_lose_a_host(folder, elastic=True)
            off = largest_difference(run, train_alone(folder, "one", "--layout.dp_shard", "1"))
            print(f"elastic: {attempts(run)} attempts, ended with {ranks_had(run)} ranks; ", end="")
            print(f"losses differ from those of one process by at most {off:.1e}")
            run = train_and_lose_a_host(folder, elastic=False)
            same = final_files(run) == final_files(train_alone(folder, "four"))
            print(f"not elastic: {attempts(run)} attempts, ended with {ranks_had(run)} ranks; ", end="")
            print(f"the last checkpoint is {'' if same else 'NOT '}that of an unharmed run, byte for byte")
        except NoHostsError as error:
            print(f"no hosts can be made here: {error}", file=sys.stderr)
            return 1
        return 0 if same and off < 1e-9 else 1


def _job(folder: Path) -> Path:
    path = folder / "job.toml"
    path.write_text(JOB)
    return path


def _steps(run: Path) -> int:
    return len(read_metrics(run)) if (run / "metrics.jsonl").exists() else 0


def _until(condition: Callable[[], bool], patience_s: float, log: IO[str]) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(Path(log.name).read_text())
        time.sleep(0.05)
