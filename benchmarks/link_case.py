"""A job that two hosts train over their link: run for real, and what came of it."""

import json
import os
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hosts import Host, environment, hosts, torchrun
from benchmarks.links import Traffic
from fivefold.config import Job, job_with, resolve
from fivefold.training.lines import Record
from fivefold.training.metrics import FILE, read_metrics

HOSTS = 2
FIRST = 4
"""Steps that are not timed: buffers are made in them, and connections find their speed."""
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Case:
    """One training.

    settings  keys of the job, over those that all cases have
    ranks     a host
    slow      whether the link is limited
    apart     each host trains alone on its share of the batch: nothing is sent
    compute   the case whose step is this one's time without messages between hosts
    validated whether the held-out loss is computed, after the last step
    """

    name: str
    settings: Mapping[str, Any]
    steps: int
    ranks: int = 1
    slow: bool = True
    apart: bool = False
    compute: str = ""
    validated: bool = False

    @property
    def hosts(self) -> int:
        return 1 if self.apart else HOSTS

    @property
    def round(self) -> int:
        """Steps from one average of the weights to the next; 1 where gradients are summed in every step."""
        return int(self.settings.get("communication.local_steps", 1))

    @property
    def fragments(self) -> int:
        """In how many parts the weights are averaged, one after the other in a round."""
        return int(self.settings.get("communication.fragments", 1))

    def job(self, common: Mapping[str, Any]) -> Job:
        """The job, resolved. Raises `BadInput`."""
        given = {**common, **self.settings, "training.steps": self.steps}
        given["training.global_batch"] = given["training.global_batch"] * self.hosts // HOSTS
        return resolve(job_with(given), self.ranks * self.hosts)


@dataclass(frozen=True)
class Outcome:
    """What a case came to.

    step_s    of one step, the median over rounds
    held_out  loss after the last step, of a case that is validated
    sent      bytes a step that the host which sent most has put on its link, headers of packets included
    peak      bytes a second: the most that a host sent over a time as long as a step, before the last step,
              in which a run waits for all that is still to be averaged
    """

    step_s: float
    held_out: float | None
    sent: float
    peak: float


def run_case(case: Case, common: Mapping[str, Any], rate: str | None, folder: Path) -> Outcome:
    """Train on hosts joined at `rate`, through torchrun. Raises `RuntimeError` with what was printed.

    folder  for the run and its output; `cache` in it is kept for other cases
    """
    job = case.job(common)
    settings = {**common, **case.settings, "training.steps": case.steps, "data.cache": str(folder / "cache")}
    settings["training.global_batch"] = job.training.global_batch
    if case.validated:
        settings["training.validate_every"] = case.steps
    words = [word for key, value in settings.items() for word in (f"--{key}", _written(value))]
    with hosts(HOSTS, rate if case.slow else None) as made:
        runs = [folder / f"{case.name}-{host.name}" if case.apart else folder / case.name for host in made]
        logs = [folder / f"{case.name}-{host.name}.log" for host in made]
        with Traffic(made) as traffic:
            started = []
            for host, run, log in zip(made, runs, logs, strict=True):
                meet = host if case.apart else made[0]
                begin = torchrun(host, meet, str(case.hosts), case.ranks)
                command = [*begin, "-m", "fivefold", "train", *words, "--run.folder", str(run)]
                started.append(_start(host, command, log))
            codes = [process.wait(PATIENCE_S) for process in started]
        if any(codes):
            raise RuntimeError("\n".join(log.read_text() for log in logs))
    records = [read_metrics(run) for run in dict.fromkeys(runs)]
    step_s = statistics.mean(step_seconds(lines, case.round) for lines in records)
    last = records[0][-1]
    last_began = (runs[0] / FILE).stat().st_mtime - last["step_time_s"]
    sent, peak = max(traffic.sent) / case.steps, traffic.peak(step_s, last_began)
    return Outcome(step_s, last.get("val_loss"), sent, peak)


def step_seconds(records: list[Record], steps_a_round: int = 1) -> float:
    """Of one step: the median over whole rounds, behind the first of them."""
    times: list[float] = [line["step_time_s"] for line in records]
    first = -(-FIRST // steps_a_round) * steps_a_round
    rounds = [times[i : i + steps_a_round] for i in range(first, len(times), steps_a_round)]
    return statistics.median(sum(each) / len(each) for each in rounds)


def _start(host: Host, command: list[str], log: Path) -> "subprocess.Popen[Any]":
    """One thread a rank: hosts share the cores of this machine."""
    with log.open("w") as file:
        env = environment(os.environ | {"OMP_NUM_THREADS": "1"})
        return host.start(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def _written(value: object) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
