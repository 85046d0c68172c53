"""How ranks fail, said so that the cause comes first. No torch here: the command line reads it too."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

LOST_PEER = "lost another rank"
"""In the line of a rank that failed only because another one did."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended. `time` is in seconds since the epoch; `step` is there if the error carries one."""

    rank: int
    time: float
    type: str
    message: str
    traceback: str = ""
    step: int | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        text = "".join(traceback.format_exception(error))
        return cls(rank, time.time(), type(error).__name__, str(error), text, getattr(error, "step", None))

    @property
    def is_echo(self) -> bool:
        """Whether this is probably the loss of a peer, not a cause of its own."""
        lost = (
            *("connection closed", "connection reset", "connection refused", "connection timed out"),
            *("broken pipe", "socket closed", "no route to host"),
        )
        return self.type.startswith("Dist") or any(words in self.message.lower() for words in lost)

    @property
    def is_death(self) -> bool:
        """Whether the process ended without a word, or lost a peer: nothing that it did by itself."""
        return self.is_echo or not self.traceback

    def write(self, folder: Path) -> None:
        """Leave the failure as `rank-N.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{self.rank}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


class NonFiniteError(Exception):
    """The loss or a gradient is not a number, or infinite. The weights have not been touched.

    problem  which, and where, in a sentence
    """

    def __init__(self, problem: str, step: int):
        advice = (
            "Try a lower optimizer.lr, more optimizer.warmup, training.clip above 0, or another precision."
        )
        super().__init__(f"{problem} The weights are those of step {step - 1}. {advice}")
        self.problem, self.step = problem, step

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, int]]:
        return NonFiniteError, (self.problem, self.step)


class RanksFailed(Exception):  # noqa: N818
    """The ranks were stopped because at least one failed; `failures` has the first cause first."""

    def __init__(self, failures: list[RankFailure], errors: Path | None = None):
        self.failures = sorted(failures, key=lambda failure: (failure.is_echo, failure.time))
        first = self.failures[0]
        lines = [f"rank {first.rank} failed: {first.type}: {first.message}"]
        if first.type != NonFiniteError.__name__:  # where in the code the numbers were looked at says nothing
            lines.append(first.traceback.rstrip())
        others = sorted(errors.glob("rank-*.json")) if errors else []
        lines += [f"see also {path}" for path in others if path.name != f"rank-{first.rank}.json"]
        super().__init__("\n".join(line for line in lines if line))
