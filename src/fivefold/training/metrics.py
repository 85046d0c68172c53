"""What a run reports about itself: `metrics.jsonl` first of all, TensorBoard and W&B from the same records.

A record is one optimizer step: step, loss, grad_norm, lr, tokens (trained on so far), step_time_s,
tokens_per_s, tokens_per_s_per_device, mfu, hfu, with fp8 mfu_fp8, memory_gib, and val_loss on validated
steps. The log adds `attempt`, which counts the starts of a run from 1. Numbers keep full precision; NaN and
infinity, which JSON lacks, are null.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fivefold.problems import Problem
from fivefold.training.lines import LineFile, Record, read_lines

if TYPE_CHECKING:
    import torch

    from fivefold.config import Job, Run

FILE = "metrics.jsonl"
FLUSH_EVERY_S = 10.0


def check_loggers(run: Run) -> list[Problem]:
    """Why a log that the job asks for cannot be written."""
    if run.wandb is not None and find_spec("wandb") is None:
        hint = "Run `pip install wandb`, or leave run.wandb out."
        return [Problem("run.wandb", f"'{run.wandb}': the wandb package is not installed", hint)]
    return []


class MetricsLog:
    """Writes the records of one attempt at a run. Only rank 0 has one.

    Each line reaches the file in one write as soon as its step is done. A restarted run appends.
    """

    def __init__(self, folder: Path, attempt: int, job: Job):
        self._attempt = attempt
        self._folder = folder
        self._tensorboard = job.run.tensorboard
        self._events: Any = None
        self._flushed = 0.0
        self._file = LineFile(folder / FILE)
        self._wandb = _wandb_run(job, folder) if job.run.wandb is not None else None

    def write(self, record: Mapping[str, Any]) -> None:
        """Log one step."""
        line = {key: _finite(value) for key, value in record.items()} | {"attempt": self._attempt}
        self._file.write(line)
        numbers = {key: value for key, value in line.items() if _is_number(value) and key != "step"}
        if self._tensorboard:
            self._write_events(record["step"], numbers)
        if self._wandb is not None:
            self._wandb.log(numbers, step=record["step"])

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_events(self, step: int, numbers: Mapping[str, float]) -> None:
        """One event a step, with all its values, written here and now.

        The usual writer makes an event of each value and hands it to a thread, which the next step then has
        to share the interpreter with: four percent of a step of 150 ms.
        """
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        now = time.time()
        if self._events is None:
            folder = self._folder / "tensorboard"
            folder.mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / "events"), f".{self._attempt}")
            # TensorBoard then hides what an earlier attempt had logged from this step on.
            started = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(wall_time=now, step=step, session_log=started))
        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._events.write_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
        if now - self._flushed >= FLUSH_EVERY_S:
            self._flushed = now
            self._events.flush()


def read_metrics(folder: Path) -> list[Record]:
    """The records of a run, one a step, by step. For a step seen twice the last line counts.

    Lines that a killed process left half-written are skipped.
    """
    found: dict[int, Record] = {}
    for line in read_lines(folder / FILE):
        found[line["step"]] = line
    return [found[step] for step in sorted(found)]


def next_attempt(folder: Path) -> int:
    """The number of the attempt that starts now: 1 in a new folder."""
    return 1 + max((line.get("attempt", 0) for line in read_lines(folder / FILE)), default=0)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory allocated so far: on the GPU, or by this process (resident) on a CPU."""
    if device.type == "cuda":
        from torch.cuda import max_memory_allocated

        return max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wandb_run(job: Job, folder: Path) -> Any:
    import wandb

    config = job.model_dump(by_alias=True, mode="json")
    return wandb.init(
        project=job.run.wandb, name=job.run.name, dir=str(folder), config=config, resume="allow"
    )
