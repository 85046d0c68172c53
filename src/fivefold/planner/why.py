"""Why a layout is not the best: what binds it, in a sentence and in numbers, and what would make it win.

And where no layout fits at all, what would make one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fivefold.axes.checks import check
from fivefold.config import job_with, list_keys, resolve
from fivefold.config.conditions import narrower_states
from fivefold.models.inventory import parameter_count
from fivefold.planner.answer import Answer
from fivefold.planner.goal import Goal, may_offload
from fivefold.planner.keys import DEGREES, KEYS, Given, setting
from fivefold.planner.memory.fullest_rank import GIB, counted_on
from fivefold.planner.search.planned import Planned
from fivefold.problems import BadInput, Problem

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "states": "optimizer states",
    "activations": "activations",
    "transient": "tensors that come and go",
    "buffers": "communication buffers",
}
TOLD = 5e-4
"""Of the best step, what a part has to be longer to be worth telling."""
SECTIONS = ("training", "layout", "communication")
"""Those whose keys a setup may have."""
MOST_DOUBLINGS = 11
SHORTEST = 128


@dataclass(frozen=True, repr=False)
class Why:
    """The binding constraint of a layout.

    verdict   "impossible", "does not fit", "slower" or "best"
    sentence  what binds it
    remedies  what would make it win, or fit, best first
    figures   the numbers behind the sentence
    """

    verdict: str
    sentence: str
    remedies: list[str]
    figures: dict[str, Any]

    def __repr__(self) -> str:
        return "\n".join([self.sentence, *(f"  {remedy}" for remedy in self.remedies)])


def why(given: Given, answer: Answer) -> Why:
    """What binds the best layout that has the given keys, beside the best of all."""
    found = answer.best_with(given)
    if found.best:
        return _against_the_best(given, found.best[0], answer)
    if found.nearest is not None:
        return _too_large(given, found.nearest, answer)
    problems = reasons(given, answer)
    sentence = " ".join(f"{p.key}: {p.message}." for p in problems) or "No layout has all of these keys."
    return Why("impossible", sentence, [p.hint for p in problems if p.hint], {})


def reasons(given: Given, answer: Answer) -> list[Problem]:
    """What a job with these keys would be refused for."""
    goal, given = answer.goal, {**answer.fixed, **given}
    settings: dict[str, Any] = {}
    for name in (key.name for key in list_keys()):
        section, _, key = name.partition(".")
        if section in SECTIONS and key not in KEYS and hasattr(goal.setup, key):
            settings[name] = getattr(goal.setup, key)
    settings["model"] = goal.setup.spec.model_dump(exclude_unset=True, exclude_none=True)
    settings["training.precision"] = goal.setup.precision.name
    settings |= {setting(key): value for key, value in given.items()}
    # More or fewer devices are no way out where the model would not take the degrees either.
    alone = math.prod(given.get(key, 1) for key in DEGREES if key != "ep" or "dp_shard" not in given)
    tried = (alone, goal.gpus) if goal.gpus % alone else (goal.gpus,)
    return next(filter(None, (_refused(settings, ranks, answer) for ranks in tried)), [])


def _refused(settings: Mapping[str, Any], ranks: int, answer: Answer) -> list[Problem]:
    try:
        return check(resolve(job_with(settings), ranks, answer.cluster.device.kind))
    except BadInput as error:
        # Ranks are devices here.
        return [replace(p, hint=p.hint.replace("--nproc", "--gpus")) for p in error.problems]


def _too_large(given: Given, nearest: Planned, answer: Answer) -> Why:
    memory, room = nearest.memory, counted_on(answer.cluster)
    need = float(memory.device) / GIB
    parts = {name: float(getattr(memory, name)) / GIB for name in PARTS}
    largest = max(parts, key=lambda name: parts[name])
    sentence = (
        f"Does not fit: {nearest.keys} needs {need - room:.1f} GiB more on stage {memory.number} "
        f"than the {room:.1f} GiB of a {answer.cluster.device.name} that can be counted on; most of its "
        f"{need:.1f} GiB are {PARTS[largest]} ({parts[largest]:.1f} GiB)."
    )
    figures = {"memory_gib": need, "device_gib": room, "over_gib": need - room, "parts_gib": parts}
    return Why("does not fit", sentence, _relaxed(given, answer), figures)


def _against_the_best(given: Given, planned: Planned, answer: Answer) -> Why:
    best = answer.best
    assert best is not None
    slower = planned.step_time / best.step_time - 1
    figures: dict[str, Any] = {
        "step_time_s": planned.step_time,
        "best_step_time_s": best.step_time,
        "memory_gib": planned.memory_gib,
        "lost_s": losses(planned, best),
    }
    if slower <= 0:
        return Why("best", f"{planned.keys} is the best layout: {planned.step_time:.4g} s.", [], figures)
    lost = sorted(figures["lost_s"].items(), key=lambda item: -item[1])
    most = [item for item in lost if item[1] > TOLD * best.step_time] or lost[:1]
    named = [f"{seconds / best.step_time:.1%} to {what}" for what, seconds in most[:3]]
    sentence = (
        f"{planned.keys} takes {planned.step_time:.4g} s, {slower:.1%} longer than {best.keys} "
        f"({best.step_time:.4g} s): it loses {', '.join(named)}."
    )
    return Why("slower", sentence, _relaxed(given, answer, planned.step_time), figures)


def losses(planned: Planned, best: Planned) -> dict[str, float]:
    """By what each part of a step is longer than the best layout's, in seconds; negative where shorter."""
    mine, theirs = planned.breakdown, best.breakdown
    return {
        "computing": mine.compute - theirs.compute,
        "the pipeline's bubble": mine.bubble - theirs.bubble,
        "the optimizer": mine.optimizer - theirs.optimizer,
    } | {
        f"exposed {axis} messages": mine.exposed.get(axis, 0.0) - theirs.exposed.get(axis, 0.0)
        for axis in mine.exposed | theirs.exposed
    }


def _relaxed(given: Given, answer: Answer, than: float = float("inf")) -> list[str]:
    """What would make a layout with these keys win, or fit."""
    if found := without_one(given, answer, than):
        return found
    for gpus in (2 * answer.goal.gpus, 4 * answer.goal.gpus):
        larger = replace(answer, goal=replace(answer.goal, gpus=gpus))
        if answer.cluster.has(gpus) and (best := larger.best_with(given).best):
            return [f"With {gpus} devices: {best[0].brief}."]
    return []


def without_one(given: Given, answer: Answer, than: float = float("inf")) -> list[str]:
    """What letting go of one of the given keys brings, for those where it helps; the most helpful first."""
    found = []
    for key in given:
        others = {name: value for name, value in given.items() if name != key}
        best = answer.best_with(others).best
        if best and best[0].step_time < than:
            better = f"Without {key}={given[key]}: {best[0].brief} with {best[0].keys}."
            found.append((best[0].step_time, better))
    return [text for _, text in sorted(found)[:3]]


def rescues(found: Answer, goal_on: Callable[[int], Goal]) -> list[str]:
    """What would make a layout fit, each tried: a batch that splits, more devices, shorter sequences, smaller
    states, or states in host memory. Then what letting go of one of the fixed keys would.

    goal_on  what is asked for, on so many devices
    """
    goal, setup = found.goal, found.goal.setup
    even = -(-setup.global_batch // goal.gpus) * goal.gpus
    words = f"--global-batch {even}, which {goal.gpus} devices share evenly"
    batch = {words: goal.changed(global_batch=even)} if even > setup.global_batch else {}
    first = (goal.gpus - 1).bit_length()
    powers = (2**exponent for exponent in range(first, first + MOST_DOUBLINGS))
    counts = [count for count in powers if count > goal.gpus and found.cluster.has(count)]
    more = {f"--gpus {count}": goal_on(count) for count in counts}
    shorter = {}
    for part in (2, 4, 8):
        if (length := setup.seq_len // part) >= SHORTEST:
            words = f"--seq-len {length} and the same tokens a step"
            shorter[words] = goal.changed(seq_len=length, global_batch=setup.global_batch * part)
    narrower = narrower_states(setup.states, setup.optimizer, setup.precision.name)
    states = {f"--optimizer.states {kind}": goal.changed(states=kind) for kind in narrower}
    may = may_offload(goal, found.cluster.device.kind)
    offload = {"--optimizer.offload true": goal.changed(offload=True)} if may else {}
    lines = [_first_that_fits(changes, found) for changes in (batch, more, shorter, states, offload)]
    if lines[1] is None:
        keys = " with the keys that are fixed" if found.fixed else ""
        most, size = max([goal.gpus, *counts]), parameter_count(setup.spec)
        lines[1] = f"Not even --gpus {most} has room for its {size:,} parameters{keys}."
    return [*filter(None, lines), *without_one(found.fixed, replace(found, fixed={}))]


def _first_that_fits(changes: Mapping[str, Goal], found: Answer) -> str | None:
    """What the first change does that helps; each is named by its words."""
    for words, goal in changes.items():
        if best := replace(found, goal=goal).best_with({}).best:
            return f"With {words}: {best[0].memory_gib:.1f} GiB, {best[0].step_time:.4g} s a step."
    return None
