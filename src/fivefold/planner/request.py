"""What a person asked `plan` for, read and refused where it makes no sense, and the answers to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fivefold.config import Job, job_with
from fivefold.config.complain import shown
from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.hardware.presets import CLUSTERS
from fivefold.ledger.precision import PRECISIONS
from fivefold.models.huggingface import read_config
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.planner.answer import Answer, answer
from fivefold.planner.goal import Goal, goal_for
from fivefold.planner.keys import layout_keys, training_keys
from fivefold.planner.memory.fullest_rank import counted_on
from fivefold.planner.scaling import quantity
from fivefold.planner.search.partial import Given, read_given
from fivefold.problems import BadInput, Problem, did_you_mean, refuse

MOST_DEVICES = 1_048_576


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned, by the options of `fivefold plan` or the arguments of `fivefold.plan`.

    Raises `BadInput` with all that is wrong, in the command line's words.

    cluster  a preset, or a file
    gpus     "auto" where the fewest that make the deadline are asked for
    compile  None where the faster of both is
    why      some keys of a layout, as `--why` takes them
    """

    model: str | None
    hf: str | None
    cluster: str
    gpus: int | str
    seq_len: int | None = None
    global_batch: int | None = None
    tokens: str | float | None = None
    price: float | None = None
    deadline: float | None = None
    precision: str | None = None
    compile: bool | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        read: dict[str, Any] = {}
        for name in ("spec", "machines", "count", "total_tokens", "given"):
            try:
                read[name] = getattr(self, name)
            except BadInput as error:
                problems += error.problems

        def wrong(option: str, message: str, hint: str) -> None:
            problems.append(Problem(option, message, hint))

        for option, value in (("--seq-len", self.seq_len), ("--global-batch", self.global_batch)):
            if value is not None and not (isinstance(value, int) and value >= 1):
                wrong(option, f"{shown(value)} is out of range", "Allowed: an integer, at least 1.")
        for option, amount in (("--price", self.price), ("--deadline", self.deadline)):
            if amount is not None and not (isinstance(amount, int | float) and 0 < amount < float("inf")):
                wrong(option, f"{shown(amount)} is out of range", "Allowed: a number above 0.")
        if self.precision is not None and str(self.precision) not in PRECISIONS:
            hint = did_you_mean(str(self.precision), PRECISIONS)
            wrong("--precision", f"'{self.precision}' is not known", hint)
        if self.compile not in (None, True, False):
            hint = "Allowed: true, false, or nothing for what is faster."
            wrong("--compile", f"{shown(self.compile)} is not known", hint)
        if self.deadline is not None and self.tokens is None:
            hint = "Say how much is to be trained on by then: --tokens 1T."
            wrong("--deadline", "is given without --tokens", hint)
        if isinstance(self.seq_len, int) and "spec" in read and self.seq_len > self.spec.max_seq_len:
            message = f"{self.seq_len} is longer than the model's {self.spec.max_seq_len}"
            wrong("--seq-len", message, f"Allowed: at most {self.spec.max_seq_len:,}.")
        if read.get("machines") and read.get("count"):
            problems += read["machines"].problems(read["count"], "--gpus")
        refuse(problems)

    @cached_property
    def spec(self) -> ModelSpec:
        return _read_model(self.model, self.hf)

    @cached_property
    def machines(self) -> Cluster:
        return find_cluster(self.cluster)

    @cached_property
    def count(self) -> int | None:
        """How many devices; None where the fewest are asked for."""
        return _read_gpus(str(self.gpus), self.deadline is not None and self.tokens is not None)

    @cached_property
    def total_tokens(self) -> float | None:
        return None if self.tokens is None else quantity("--tokens", str(self.tokens))

    @cached_property
    def given(self) -> Given:
        return {} if self.why is None else read_given(self.why, "--why")

    def answer(self) -> Answer:
        """The best layouts; for as few devices as make the deadline where their number was left open."""
        if self.count is not None:
            return self.answer_for(self.count)
        from fivefold.planner.fewest import fewest

        return fewest(self)

    def answer_for(self, gpus: int) -> Answer:
        return answer(self.goal(gpus), self.machines, self.total_tokens, self.price)

    def goal(self, gpus: int, seq_len: int | None = None) -> Goal:
        """What is asked for, on so many devices."""
        host, length = self.machines.device.is_host, seq_len or self.seq_len
        precision = self.precision or ("fp32" if host else "bf16")
        compile = False if self.compile is None and host else self.compile
        return goal_for(self.spec, gpus, length, self.global_batch, precision, compile)

    def in_time(self, found: Answer) -> bool:
        """Whether the best layout makes the deadline."""
        days = None if found.best is None else found.days(found.best.step_time)
        return days is not None and (self.deadline is None or days <= self.deadline)

    def late(self, found: Answer) -> str | None:
        """What to say when the best layout misses the deadline."""
        if found.best is None or self.deadline is None or self.tokens is None or self.in_time(found):
            return None
        days = found.days(found.best.step_time)
        return (
            f"{days:.3g} days is past the deadline of {self.deadline:g}. "
            "Use more devices (--gpus auto finds how many), or fewer tokens."
        )

    def job(self, found: Answer, *settings: Mapping[str, Any]) -> Job:
        """A job that trains as the best layout says, with what is given over it as `job_with` takes it."""
        assert found.best is not None
        goal, setup = found.goal, found.best.setup
        planned: dict[str, Any] = {
            "training.seq_len": goal.seq_len,
            "training.global_batch": goal.global_batch,
            "training.precision": goal.precision.name,
            "layout.auto": False,
            **{f"layout.{key}": value for key, value in layout_keys(setup).items()},
            **{f"training.{key}": value for key, value in training_keys(setup).items()},
        }
        known = self.cluster in CLUSTERS
        planned["cluster.preset" if known else "cluster.file"] = (
            self.cluster if known else str(Path(self.cluster).resolve())
        )
        if self.hf is not None:
            planned["model.hf"] = str(Path(self.hf).resolve())
        if found.tokens is not None:
            planned["training.steps"] = max(1, round(found.tokens / goal.tokens))
        return job_with(planned, *settings, preset=self.model)

    def nearest(self, found: Answer) -> dict[str, Any]:
        """Where nothing fits: how far the nearest layout is, and what would make it fit."""
        from fivefold.planner.rescue import rescues

        near, remedies = found.searched.nearest, rescues(self, found)
        told: dict[str, Any] = {"remedies": remedies}
        if near is not None:
            need, room = near.memory_gib, counted_on(near.memory, found.cluster)
            told |= {"memory_gib": need, "over_gib": need - room}
            told |= {key: value for key, value in found.row(near).items() if key in ("layout", "training")}
            why = (
                f"the nearest needs {need:.1f} GiB a device, {need - room:.1f} GiB more than the "
                f"{room:.1f} GiB of a {found.cluster.device.name} that can be counted on"
            )
        elif found.searched.pruned:
            why = "every layout's weights, gradients and states are larger than a device"
        else:
            goal = found.goal
            why = (
                f"{goal.gpus} devices cannot share {goal.global_batch} sequences of {goal.seq_len} tokens, "
                f"{goal.spec.layers} layers and {goal.spec.heads} heads evenly"
            )
        return {"sentence": "\n  ".join([f"No layout fits: {why}.", *remedies])} | told


def _read_model(model: str | None, hf: str | None) -> ModelSpec:
    if (model is None) == (hf is None):
        hint = "Give one of --model NAME (`fivefold models` lists them) and --hf config.json."
        raise BadInput([Problem("--model", "both given" if model else "not given, nor --hf", hint)])
    if hf is not None:
        return read_config(str(hf))
    name = str(model)
    if ":" in name:
        hint = "The planner takes presets and Hugging Face configs: --model NAME or --hf config.json."
        message = f"'{name}' is a model of your own, whose computations are not known"
        raise BadInput([Problem("--model", message, hint)])
    if name not in PRESETS:
        raise BadInput([Problem("--model", f"'{name}' is not known", did_you_mean(name, PRESETS))])
    return PRESETS[name]


def _read_gpus(text: str, has_deadline: bool) -> int | None:
    if text == "auto":
        if not has_deadline:
            hint = "Say what is to be done by when: --tokens 1T --deadline 30."
            raise BadInput([Problem("--gpus", "'auto' needs --tokens and --deadline", hint)])
        return None
    hint = f"Allowed: 1 to {MOST_DEVICES:,}, or auto."
    try:
        count = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise BadInput([Problem("--gpus", f"'{text}' is not a number", hint)]) from None
    if not 1 <= count <= MOST_DEVICES:
        raise BadInput([Problem("--gpus", f"{count} is out of range", hint)])
    return count
