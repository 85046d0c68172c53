"""Planning: the best layouts of a model on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Unpack

from fivefold.api.jobs import PlannedSections, Sections, checked_overrides
from fivefold.api.words import in_python, python_words
from fivefold.config import Job, by_key
from fivefold.planner.allowed import Allowed
from fivefold.planner.answer import Answer
from fivefold.planner.keys import given_problems
from fivefold.planner.request import Request
from fivefold.planner.search.best import SearchResult
from fivefold.planner.search.planned import Planned
from fivefold.planner.why import Why
from fivefold.planner.why import why as explain
from fivefold.problems import BadNews, refuse
from fivefold.report.plan_text import columns, title
from fivefold.report.table import as_table


@python_words()
def plan(
    model: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    hf: str | PathLike[str] | None = None,
    cluster: str | PathLike[str] = "dgx-h100",
    gpus: int | str = 8,
    seq_len: int | None = None,
    global_batch: int | None = None,
    tokens: str | float | None = None,
    price: float | None = None,
    deadline: float | None = None,
    precision: str | None = None,
    compile: bool | None = None,
    allow: str | None = None,
    **sections: Unpack[PlannedSections],
) -> Plan:
    """The best layouts of a model on a cluster, as `fivefold plan` finds them. Raises `BadInput`.

    model         a built-in model: `fivefold models` lists them
    overrides     keys of a job that every layout is to have, `{"layout.tp": 8, "model.max_seq_len": 32768}`
    hf            in its place, a Hugging Face config.json
    cluster       a built-in cluster, or a file that `fivefold probe` wrote
    gpus          how many devices; "auto": as few as make the deadline
    seq_len       tokens in a sequence; left out, 8192 or the model's longest
    global_batch  sequences in a step; left out, about 4 million tokens, at least 1024 a device
    tokens        to be trained on, 1e12 or "1T": gives days
    price         of one device for one hour: gives the cost
    deadline      days that training may take
    precision     bf16, fp16, fp32 or fp64; left out, bf16 on a GPU and fp32 on a CPU
    compile       whether torch compiles the blocks; left out, what is faster
    allow         settings that change the numbers and may be used, "int8,local": see `Plan.allowed`
    sections      more such keys by section, `layout={"tp": 8}`
    """
    request = Request(
        model=model,
        hf=None if hf is None else str(hf),
        cluster=str(cluster),
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        tokens=tokens,
        price=price,
        deadline=deadline,
        precision=precision,
        compile=compile,
        allow=allow,
        keys=by_key(checked_overrides(overrides), sections),
    )
    return Plan(request, request.answer())


@dataclass(frozen=True, repr=False)
class Plan:
    """The best layouts of a model on a cluster. It prints as a table.

    request  what was asked for
    answer   what the search says about it
    """

    request: Request
    answer: Answer

    @property
    def searched(self) -> SearchResult:
        """All that the search found: the best layouts, the Pareto front, how many it looked at."""
        return self.answer.searched

    @property
    def best(self) -> Planned | None:
        """The fastest layout that fits; None where none does."""
        return self.answer.best

    @property
    def allowed(self) -> list[Allowed]:
        """What was allowed, each with its fastest layout and what it gains over the best without."""
        return self.request.allowed(self.answer)

    @property
    def gpus(self) -> int:
        return self.answer.goal.gpus

    @property
    def mfu(self) -> float | None:
        """Of the best layout; None where none fits, or where the device's peak is not known."""
        return None if self.best is None else self.answer.mfu(self.best.step_time)

    @property
    def days(self) -> float | None:
        """Of training with the best layout; None without `tokens`."""
        return None if self.best is None else self.answer.days(self.best.step_time)

    @property
    def cost(self) -> float | None:
        """Of training with the best layout; None without `tokens` or a price."""
        return None if self.best is None else self.answer.cost(self.best.step_time)

    @property
    def table(self) -> str:
        """The best layouts, a line each."""
        if self.best is None:
            return f"{title(self.answer)}\nNo layout fits. `nearest()` says what would make one fit."
        lines = [title(self.answer), as_table(*columns(self.answer, self.searched.best))]
        return "\n".join([*lines, *([self.late] if self.late else [])])

    @property
    def late(self) -> str | None:
        """By how much the best layout misses the deadline, in a sentence; None where it does not."""
        sentence = self.request.late(self.answer)
        return None if sentence is None else in_python(sentence)

    def nearest(self) -> str:
        """Where nothing fits: how far the nearest layout is, and what would make it fit."""
        return in_python(self.request.nearest(self.answer)["sentence"]) if self.best is None else ""

    @python_words()
    def why(self, **keys: int | str) -> Why:
        """What binds the best layout that has these keys (`tp=4, pp=2`). Raises `BadInput`."""
        refuse(given_problems(keys, "--why"))
        return explain(self.request.open(keys), self.answer)

    @python_words()
    def job(self, overrides: Mapping[str, Any] | None = None, **sections: Unpack[Sections]) -> Job:
        """A job that trains as the best layout says, with settings over it as `fivefold.job` takes them.

        Raises `BadInput`, or `BadNews` where no layout fits.
        """
        if self.best is None:
            raise BadNews(self.nearest())
        return self.request.job(self.answer, checked_overrides(overrides), sections)

    def as_json(self) -> dict[str, Any]:
        """What `fivefold plan --json` prints."""
        return self.answer.as_json()

    def __repr__(self) -> str:
        return self.table
