"""What a person asked `plan` for, read and refused where it makes no sense, and the answers to it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fivefold.config import Job, job_with, list_keys
from fivefold.config.complain import shown
from fivefold.config.resolve import length_problems, unplanned
from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.hardware.presets import CLUSTERS
from fivefold.ledger.precision import PRECISIONS, Precision
from fivefold.ledger.setup import Setup
from fivefold.planner.answer import Answer, answer
from fivefold.planner.auto import goal_of
from fivefold.planner.fewest import fewest
from fivefold.planner.goal import Goal, goal_for
from fivefold.planner.keys import layout_keys, training_keys
from fivefold.planner.memory.fullest_rank import counted_on
from fivefold.planner.scaling import quantity
from fivefold.planner.search.partial import Given, given_in, read_given, setting
from fivefold.planner.why import reasons, rescues
from fivefold.problems import BadInput, Problem, either, refuse

MOST_DEVICES = 1_048_576

SHORT = {
    "model": "model.preset",
    "hf": "model.hf",
    "seq_len": "training.seq_len",
    "global_batch": "training.global_batch",
    "precision": "training.precision",
    "compile": "training.compile",
}
"""Options that are short for a key of a job."""
INSTEAD = {"cluster.preset": "--cluster", "cluster.file": "--cluster", "training.steps": "--tokens"}
PLANNED_SECTIONS = ("model", "optimizer", "communication")
PLANNED_KEYS = {field.name for field in fields(Setup)}
"""Of the other sections."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned, by the options of `fivefold plan` or the arguments of `fivefold.plan`.

    Raises `BadInput` with all that is wrong, in the command line's words.

    cluster  a preset, or a file
    gpus     "auto" where the fewest that make the deadline are asked for
    compile  None where the faster of both is
    why      some keys of a layout, as `--why` takes them
    keys     more keys of a job, dotted, with their values
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
    keys: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        read: dict[str, Any] = {}
        for name in ("asked", "machines", "count", "total_tokens", "given"):
            try:
                read[name] = getattr(self, name)
            except BadInput as error:
                problems += error.problems
        for option, amount in (("--price", self.price), ("--deadline", self.deadline)):
            if amount is not None and not (isinstance(amount, int | float) and 0 < amount < float("inf")):
                hint = "Allowed: a number above 0."
                problems.append(Problem(option, f"{shown(amount)} is out of range", hint))
        if self.deadline is not None and self.tokens is None:
            hint = "Say how much is to be trained on by then: --tokens 1T."
            problems.append(Problem("--deadline", "is given without --tokens", hint))
        if read.get("machines") and read.get("count"):
            problems += read["machines"].problems(read["count"], "--gpus")
        if {"asked", "machines"} <= read.keys():
            problems += _without_peak(self.machines, self.cluster, self.goal(1).precision)
        refuse(dict.fromkeys(problems))  # `given` repeats those of `asked`

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that is given of a job, by its keys. Raises `BadInput` where one is given twice."""
        found: dict[str, Any] = {}
        names: dict[str, list[str]] = defaultdict(list)
        options = {_option(name): (key, getattr(self, name)) for name, key in SHORT.items()}
        keys = {f"--{key}": (key, value) for key, value in self.keys.items()}
        for name, (key, value) in (options | keys).items():
            if value is not None:
                found[key] = value
                names["model.preset" if key == "model.hf" else key].append(name)
        refuse(
            Problem(given[0], f"given together with {given[1]}", "Keep one of the two.")
            for given in names.values()
            if len(given) > 1
        )
        return found

    @cached_property
    def asked(self) -> Job:
        """A job of what is given; what is left open has a job's own defaults. Raises `BadInput`."""
        known = {key.name for key in list_keys()}
        taken = {key: value for key, value in self.settings.items() if key not in known or _plannable(key)}
        problems = [_unplannable(key, self.keys[key]) for key in self.settings if key not in taken]
        if not any(key.startswith("model.") for key in taken):
            hint = "Give one of --model NAME (`fivefold models` lists them) and --hf config.json."
            problems.append(Problem("--model", "not given, nor --hf", hint))
        elif ":" in str(self.model):
            hint = "The planner takes presets and Hugging Face configs: --model NAME or --hf config.json."
            problems.append(replace(unplanned("--model", self.model), hint=hint))
        else:
            try:
                job = job_with(taken)
                problems += length_problems(job, job.spec) if "training.seq_len" in taken else []
            except BadInput as error:
                problems += error.problems
        refuse(map(self._in_options, problems))
        return job

    def _in_options(self, problem: Problem) -> Problem:
        """A problem of a key that was given by an option."""
        for name, key in SHORT.items():
            if problem.key == key and getattr(self, name) is not None:
                return replace(problem, key=_option(name))
        return problem

    @cached_property
    def fixed(self) -> Given:
        """Keys that every layout is to have."""
        return given_in(self.asked)

    @cached_property
    def machines(self) -> Cluster:
        return find_cluster(self.cluster)

    @cached_property
    def count(self) -> int | None:
        """How many devices; None where the fewest are asked for."""
        text = str(self.gpus)
        if text == "auto":
            if self.deadline is not None and self.tokens is not None:
                return None
            hint = "Say what is to be done by when: --tokens 1T --deadline 30."
            raise BadInput([Problem("--gpus", "'auto' needs --tokens and --deadline", hint)])
        hint = f"Allowed: 1 to {MOST_DEVICES:,}, or auto."
        try:
            count = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            raise BadInput([Problem("--gpus", f"'{text}' is not a number", hint)]) from None
        if not 1 <= count <= MOST_DEVICES:
            raise BadInput([Problem("--gpus", f"{count} is out of range", hint)])
        return count

    @cached_property
    def total_tokens(self) -> float | None:
        return None if self.tokens is None else quantity("--tokens", str(self.tokens))

    @cached_property
    def given(self) -> Given:
        return {} if self.why is None else self.open(read_given(self.why, "--why"))

    def open(self, given: Given) -> Given:
        """Keys to ask about, if they are open. Raises `BadInput`."""
        refuse(
            Problem("--why", f"{key}={value}, but --{setting(key)} fixes it", "Leave one of the two out.")
            for key, value in given.items()
            if key in self.fixed
        )
        return given

    def answer(self) -> Answer:
        """The best layouts; for as few devices as make the deadline where their number was left open.

        Raises `BadInput` where no layout can have the keys that are fixed.
        """
        if self.count is not None:
            found = self.answer_for(self.count)
        else:
            found = fewest(self.machines, self.answer_for, self.in_time)
        if self.fixed and not found.searched.bounded:
            refuse(map(self._in_options, reasons({}, found)))
        return found

    def answer_for(self, gpus: int) -> Answer:
        return answer(self.goal(gpus), self.machines, self.total_tokens, self.price, self.fixed)

    def goal(self, gpus: int, seq_len: int | None = None) -> Goal:
        """What is asked for, on so many devices."""
        length, batch = (self.settings.get(f"training.{key}") for key in ("seq_len", "global_batch"))
        usual = goal_for(self.asked.spec, gpus, seq_len or length, batch)
        goal = goal_of(self.asked, gpus, self.machines.device.kind)
        goal = goal.changed(seq_len=usual.seq_len, global_batch=usual.global_batch)
        is_open = "training.compile" not in self.settings and not self.machines.device.is_host
        return replace(goal, may_compile=is_open)

    def in_time(self, found: Answer) -> bool:
        """Whether the best layout makes the deadline."""
        days = None if found.best is None else found.days(found.best.step_time)
        return days is not None and (self.deadline is None or days <= self.deadline)

    def late(self, found: Answer) -> str | None:
        """What to say when the best layout misses the deadline."""
        if found.best is None or self.deadline is None or self.tokens is None or self.in_time(found):
            return None
        return (
            f"{found.days(found.best.step_time):.3g} days is past the deadline of {self.deadline:g}. "
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
        if self.cluster in CLUSTERS:
            planned["cluster.preset"] = self.cluster
        else:
            planned["cluster.file"] = str(Path(self.cluster).resolve())
        if self.asked.model.hf is not None:
            planned["model.hf"] = str(Path(self.asked.model.hf).resolve())
        if found.tokens is not None:
            planned["training.steps"] = max(1, round(found.tokens / goal.tokens))
        return job_with(self.settings, planned, *settings)

    def nearest(self, found: Answer) -> dict[str, Any]:
        """Where nothing fits: how far the nearest layout is, and what would make it fit."""
        near, room = found.searched.nearest, counted_on(found.cluster)
        told: dict[str, Any] = {"remedies": rescues(found, self.goal)}
        if near is not None:
            need, setup = near.memory_gib, near.setup
            told |= {"memory_gib": need, "over_gib": need - room}
            told |= {"layout": layout_keys(setup), "training": training_keys(setup)}
            why = (
                f"the nearest needs {need:.1f} GiB a device, {need - room:.1f} GiB more than the "
                f"{room:.1f} GiB of a {found.cluster.device.name} that can be counted on"
            )
        elif found.searched.bounded:
            why = "every layout's weights, gradients and states are larger than a device"
        else:
            goal = found.goal
            why = (
                f"{goal.gpus} devices cannot share {goal.global_batch} sequences of {goal.seq_len} tokens, "
                f"{goal.spec.layers} layers and {goal.spec.heads} heads evenly"
            )
        return {"sentence": "\n  ".join([f"No layout fits: {why}.", *told["remedies"]])} | told


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plannable(key: str) -> bool:
    """Whether a plan may depend on a key of a job."""
    section, _, name = key.partition(".")
    return key != "model.module" and (section in PLANNED_SECTIONS or name in PLANNED_KEYS)


def _unplannable(key: str, value: object) -> Problem:
    if key == "model.module":
        return unplanned(key, value)
    if key in INSTEAD:
        return Problem(key, f"{shown(value)}: `plan` has an option for it", f"Use {INSTEAD[key]}.")
    names = [each.name for each in list_keys() if each.name.startswith("training.") and _plannable(each.name)]
    sections = ", ".join(f"{section}.*" for section in PLANNED_SECTIONS)
    hint = f"Allowed: {sections}, layout.* but auto, {', '.join(names)}. Others belong to a job."
    return Problem(key, f"{shown(value)}: a plan does not depend on it", hint)


def _without_peak(cluster: Cluster, where: str, precision: Precision) -> list[Problem]:
    """Why times in a precision are not known; empty when they are."""
    known = {*cluster.device.peak_flops, *(cluster.measured.matmul if cluster.measured else ())}
    if precision.compute in known:
        return []
    message = f"a {cluster.device.name} has none for {precision.compute}, and {precision.name} is planned for"
    others = [f"--precision {other.name}" for other in PRECISIONS.values() if other.compute in known]
    missing = f"device.peak_flops.{precision.compute} (FLOP/s, above 0)"
    return [Problem(f"{where}: device.peak_flops", message, f"Give {either([missing, *others])}.")]
