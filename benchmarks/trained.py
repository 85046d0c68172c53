"""`fivefold train` as a process of its own, for benchmarks that hold several runs beside each other.

Cards of one kind differ by some percent, and a process that has run leaves nothing behind on the card: so
what is compared runs on one card, in turns, each in a process. `compiled_in` names a folder in which they all
find what the first of them compiled.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fivefold.training.lines import Record
from fivefold.training.metrics import read_metrics

SMALL = {
    "model.vocab_size": 320,
    "model.dim": 64,
    "model.layers": 2,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ffn": 128,
    "model.max_seq_len": 64,
    "training.seq_len": 32,
    "training.compile": "false",
    "training.precision": "bf16",
}
"""Of `--small`: a model with which any machine shows in seconds that a benchmark runs."""
ALWAYS = {"checkpoint.keep": 0, "run.tensorboard": "false", "resilience.restarts": 0}
"""Of every run that is only timed."""


ASKED = """
import json, torch
card = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps([card.name, card.total_memory] if card else ["CPU", None]))
"""


@dataclass(frozen=True)
class Machine:
    """What figures are of: the card, its memory (None of a CPU), and the version of torch."""

    device: str
    memory_gib: float | None
    torch: str

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}"


class DoesNotFitError(RuntimeError):
    """A run needed more memory than its device has."""


@dataclass(frozen=True)
class Steady:
    """The second half of a run's steps: the median seconds of one, tokens a second, and the most memory."""

    step_s: float
    tokens_per_s: float
    memory_gib: float

    @staticmethod
    def of(seconds: Sequence[float], tokens: int, memory_gib: float) -> "Steady":
        """seconds: of all steps; tokens: of one."""
        step_s = statistics.median(seconds[len(seconds) // 2 :])
        return Steady(step_s, tokens / step_s, memory_gib)


def words_of(settings: Mapping[str, object]) -> list[str]:
    """Keys of a job with their values, as the command line takes them."""
    return [f"--{key}={value}" for key, value in settings.items()]


def shrunk(settings: Mapping[str, object]) -> dict[str, object]:
    """The same settings of the small model, whose layers are all too small to gain by 8 bits."""
    fp8 = {"training.fp8_small": "true"} if "training.fp8" in settings else {}
    return {**settings, **SMALL, **fp8}


def environment(compiled_in: str | None) -> dict[str, str]:
    """That of processes which share what they compile, in a folder or where torch has it by itself."""
    shared = {} if compiled_in is None else {"TORCHINDUCTOR_CACHE_DIR": str(Path(compiled_in).absolute())}
    return {**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1", **shared}


def output_of(command: Sequence[str], compiled_in: str | None = None) -> str:
    """What a process prints. Raises `DoesNotFitError`, or `RuntimeError` with the end of what it said."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment(compiled_in))
    if done.returncode:
        said = done.stdout + done.stderr
        kind = DoesNotFitError if "out of memory" in said.lower() else RuntimeError
        raise kind(f"{' '.join(command)}\n{said[-4000:]}")
    return done.stdout


def train(words: Sequence[str], folder: Path, compiled_in: str | None = None) -> list[Record]:
    """The records of a run in a folder, one a step; words as of `fivefold train`."""
    command = [sys.executable, "-m", "fivefold", "train", *words, "--run", str(folder)]
    output_of(command, compiled_in)
    return read_metrics(folder)


def timed(words: Sequence[str], steps: int, compiled_in: str | None = None) -> Steady:
    """A run that leaves nothing, started although the planner has it that memory is too small."""
    with tempfile.TemporaryDirectory() as folder:
        more = [*words_of(ALWAYS), f"--training.steps={steps}", "--force"]
        records = train([*words, *more], Path(folder) / "run", compiled_in)
    seconds = [float(record["step_time_s"]) for record in records]
    return Steady.of(seconds, records[0]["tokens"], float(records[-1]["memory_gib"]))


def machine() -> Machine:
    """Asked in a process of its own: it takes memory of the card."""
    name, memory = json.loads(output_of([sys.executable, "-c", ASKED]).splitlines()[-1])
    return Machine(name, memory and memory / 2**30, torch.__version__)
