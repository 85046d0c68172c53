"""What a person asked `plan` for, read and refused where it makes no sense, and the answers to it."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fivefold.config import Job, fp8, job_with, list_keys
from fivefold.config.complain import shown
from fivefold.config.resolve import length_problems, offload_problems, states_problems, unplanned
from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.hardware.presets import CLUSTERS
from fivefold.ledger.precision import PRECISIONS, Precision
from fivefold.ledger.setup import Setup
from fivefold.planner.allowed import CHOICES, Allowed, allowed, read_allowed
from fivefold.planner.answer import Answer, fewest
from fivefold.planner.goal import USUAL_LENGTH, Goal, goal_of, usual_batch
from fivefold.planner.keys import Given, as_sections, given_in, read_given, setting
from fivefold.planner.memory.fullest_rank import counted_on
from fivefold.planner.scaling import quantity
from fivefold.planner.why import reasons, rescues
from fivefold.problems import BadInput, Problem, either, refuse

MOST_DEVICES = 1_048_576

SHORT = {"model": "model.preset", "hf": "model.hf"} | {
    name: f"training.{name}" for name in ("seq_len", "global_batch", "precision", "compile")
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
    allow    settings that change the numbers and may be used: "int8,local"
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
    allow: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        read: dict[str, Any] = {}
        for name in ("asked", "machines", "count", "total_tokens", "given", "may"):
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
            setup = self.goal(1).setup
            problems += _without_peak(self.machines, self.cluster, setup.precision)
            problems += _without_fp8(self.machines, setup.fp8)
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
        refused = {key: _unplannable(key, value) for key, value in self.settings.items()}
        problems = [problem for problem in refused.values() if problem is not None]
        taken = {key: value for key, value in self.settings.items() if refused[key] is None}
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
                problems += [*states_problems(job), *offload_problems(job)]
                problems += fp8.problems(job, job.spec)
            except BadInput as error:
                problems += error.problems
        refuse(map(self._in_options, problems))
        return job

    def _in_options(self, problem: Problem) -> Problem:
        """A problem of a key that was given by an option."""
        options = {key: _option(name) for name, key in SHORT.items() if getattr(self, name) is not None}
        return replace(problem, key=options.get(problem.key, problem.key))

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
        message = f"'{text}' is not a number"
        with suppress(ValueError):
            count = int(text.replace(",", "").replace("_", ""))
            if 1 <= count <= MOST_DEVICES:
                return count
            message = f"{count} is out of range"
        raise BadInput([Problem("--gpus", message, f"Allowed: 1 to {MOST_DEVICES:,}, or auto.")])

    @cached_property
    def total_tokens(self) -> float | None:
        return None if self.tokens is None else quantity("--tokens", str(self.tokens))

    @cached_property
    def given(self) -> Given:
        return {} if self.why is None else self.open(read_given(self.why, "--why"))

    @cached_property
    def may(self) -> list[str]:
        """Names of what is allowed. Raises `BadInput` where a key says the same."""
        names = read_allowed(self.allow)
        refuse(
            Problem("--allow", f"'{name}', but --communication.{key} is given", "Leave one of the two out.")
            for name in names
            for key in dict.fromkeys(key for settings in CHOICES[name] for key in settings)
            if f"communication.{key}" in self.keys
        )
        return names

    def allowed(self, found: Answer) -> list[Allowed]:
        """What is allowed beside the answer without it."""
        return [allowed(name, found) for name in self.may]

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
            found = fewest(self.machines, self.answer_for, self.late)
        if not found.searched.best and found.searched.nearest is None and self.fixed:
            refuse(map(self._in_options, reasons({}, found)))
        return found

    def answer_for(self, gpus: int) -> Answer:
        price = self.machines.price if self.price is None else self.price
        return Answer(self.goal(gpus), self.machines, self.total_tokens, price, self.fixed)

    def goal(self, gpus: int) -> Goal:
        """What is asked for, on so many devices."""
        given, spec, device = self.settings, self.asked.spec, self.machines.device
        seq_len = given.get("training.seq_len") or min(spec.max_seq_len, USUAL_LENGTH)
        batch = given.get("training.global_batch") or usual_batch(spec, seq_len, gpus)
        goal = goal_of(self.asked, gpus, device.kind).changed(seq_len=seq_len, global_batch=batch)
        return replace(goal, may_compile="training.compile" not in given and not device.is_host)

    def late(self, found: Answer) -> str | None:
        """What to say when the best layout misses the deadline."""
        days = None if found.best is None else found.days(found.best.step_time)
        if days is None or self.deadline is None or days <= self.deadline:
            return None
        return (
            f"{days:.3g} days is past the deadline of {self.deadline:g}. "
            "Use more devices (--gpus auto finds how many), or fewer tokens."
        )

    def job(self, found: Answer, *settings: Mapping[str, Any]) -> Job:
        """A job that trains as the best layout says, with what is given over it as `job_with` takes it."""
        assert found.best is not None
        setup = found.best.setup
        planned: dict[str, Any] = {
            **as_sections(setup),
            "training.seq_len": setup.seq_len,
            "training.global_batch": setup.global_batch,
            "training.precision": setup.precision.name,
        }
        if self.cluster in CLUSTERS:
            planned["cluster.preset"] = self.cluster
        else:
            planned["cluster.file"] = str(Path(self.cluster).resolve())
        if self.asked.model.hf is not None:
            planned["model.hf"] = str(Path(self.asked.model.hf).resolve())
        if found.tokens is not None:
            rounds = setup.local_steps  # the last one is as long as the others
            planned["training.steps"] = rounds * max(1, round(found.tokens / found.goal.tokens / rounds))
        return job_with(self.settings, planned, *settings)

    def nearest(self, found: Answer) -> dict[str, Any]:
        """Where nothing fits: how far the nearest layout is, and what would make it fit."""
        remedies, figures, setup = rescues(found, self.goal), {}, found.goal.setup
        if near := found.searched.nearest:
            need, room = near.memory_gib, counted_on(found.cluster)
            figures = {"memory_gib": need, "over_gib": need - room, **as_sections(near.setup)}
            why = (
                f"the nearest needs {need:.1f} GiB a device, {need - room:.1f} GiB more than the "
                f"{room:.1f} GiB of a {found.cluster.device.name} that can be counted on"
            )
        else:
            why = (
                f"{found.goal.gpus} devices cannot share {setup.global_batch} sequences of {setup.seq_len} "
                f"tokens, {setup.spec.layers} layers and {setup.spec.heads} heads evenly"
            )
        sentence = "\n  ".join([f"No layout fits: {why}.", *remedies])
        return {"sentence": sentence, "remedies": remedies, **figures}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _unplannable(key: str, value: object) -> Problem | None:
    """Why no plan depends on a key of a job; None where one may, and where no job has such a key."""
    if key == "model.module":
        return unplanned(key, value)
    if key in INSTEAD:
        return Problem(key, f"{shown(value)}: `plan` has an option for it", f"Use {INSTEAD[key]}.")
    section, _, name = key.partition(".")
    if section in PLANNED_SECTIONS or name in PLANNED_KEYS:
        return None
    known = [each.name for each in list_keys()]
    if key not in known:
        return None
    names = [each for each in known if each.removeprefix("training.") in PLANNED_KEYS]
    sections = ", ".join(f"{section}.*" for section in PLANNED_SECTIONS)
    hint = f"Allowed: {sections}, layout.* but auto, {', '.join(names)}. Others belong to a job."
    return Problem(key, f"{shown(value)}: a plan does not depend on it", hint)


def _without_fp8(cluster: Cluster, scales: str) -> list[Problem]:
    """Why a device does not compute in 8 bits. (A CPU emulates it, and gains nothing.)"""
    device = cluster.device
    if scales == "none" or device.is_host or "float8" in device.peak_flops:
        return []
    message = f"'{scales}': a {device.name} does not compute in 8 bits"
    return [Problem("training.fp8", message, "Leave it out, or plan for a device that does: an H100, say.")]


def _without_peak(cluster: Cluster, where: str, precision: Precision) -> list[Problem]:
    """Why times in a precision are not known; empty when they are."""
    known = {*cluster.device.peak_flops, *(cluster.measured.matmul if cluster.measured else ())}
    if precision.compute in known:
        return []
    message = f"a {cluster.device.name} has none for {precision.compute}, and {precision.name} is planned for"
    others = [f"--precision {other.name}" for other in PRECISIONS.values() if other.compute in known]
    missing = f"device.peak_flops.{precision.compute} (FLOP/s, above 0)"
    return [Problem(f"{where}: device.peak_flops", message, f"Give {either([missing, *others])}.")]
