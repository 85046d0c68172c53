"""The rule-of-thumb recipe for scaling up, followed step by step, each rule beside what the search says.

The rules are those of lectures and primers on large-scale training: replicate, then shard, then recompute,
then shard within groups, and split the model only at the end. "Many knobs: maximise MFU."
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fivefold.models.inventory import parameter_count
from fivefold.planner.answer import Answer
from fivefold.planner.keys import Given
from fivefold.planner.memory.fullest_rank import counted_on
from fivefold.planner.search.best import SearchResult

DATA_ONLY: Given = {"tp": 1, "pp": 1, "cp": 1, "ep": 1}


class Rule(NamedTuple):
    """What the texts say, for how many (devices, parameters, tokens of a sequence), and the keys it gives."""

    advice: str
    asked: Callable[[int, int, int], bool]
    given: Given


RULES = (
    Rule(
        "Data parallelism (DDP), up to about 128 devices and 1 billion parameters.",
        lambda gpus, parameters, length: gpus <= 128 and parameters <= 1e9,
        {**DATA_ONLY, "zero": 0, "recompute": "none"},
    ),
    Rule(
        "Past about 1 billion parameters: FSDP.",
        lambda gpus, parameters, length: parameters > 1e9,
        {**DATA_ONLY, "zero": 3, "dp_replicate": 1, "recompute": "none"},
    ),
    Rule(
        "Then activation checkpointing, for a larger batch on each device.",
        lambda gpus, parameters, length: parameters > 1e9,
        {**DATA_ONLY, "zero": 3, "dp_replicate": 1, "recompute": "full"},
    ),
    Rule(
        "Past about 256 to 512 devices: HSDP, sharded inside groups on fast links.",
        lambda gpus, parameters, length: gpus > 256,
        {**DATA_ONLY, "zero": 3},
    ),
    Rule(
        "Past about 1,000 devices, 50 billion parameters or 10 thousand tokens of sequence: context, "
        "pipeline and tensor parallelism.",
        lambda gpus, parameters, length: gpus > 1000 or parameters > 50e9 or length > 10_000,
        {},
    ),
)


class Step(NamedTuple):
    """One rule beside the search: what the best layout that follows it takes."""

    rule: Rule
    asked: bool
    searched: SearchResult

    def says(self, answer: Answer) -> str:
        """What the search says of the rule, in a sentence."""
        if self.searched.best:
            planned = self.searched.best[0]
            mfu = answer.mfu(planned.step_time)
            speed = f"{planned.step_time:.4g} s a step" + (f", {mfu:.1%} MFU" if mfu else "")
            if (best := answer.best) and planned.step_time > best.step_time * 1.001:
                speed += f" ({planned.step_time / best.step_time - 1:.0%} longer than the best)"
            return f"{speed}, {planned.memory_gib:.1f} GiB"
        if near := self.searched.nearest:
            return f"does not fit: {near.memory_gib:.0f} GiB of {counted_on(answer.cluster):.0f}"
        batch, gpus = answer.goal.setup.global_batch, answer.goal.gpus
        return f"impossible: a batch of {batch} does not split over {gpus} devices in this way"

    def as_json(self, answer: Answer) -> dict[str, Any]:
        row = answer.row(self.searched.best[0]) if self.searched.best else None
        return {"rule": self.rule.advice, "applies": self.asked, "search": self.says(answer), "layout": row}


def recipe(answer: Answer) -> list[Step]:
    """The rules in order, whether each applies here, and the best layout that follows it."""
    setup = answer.goal.setup
    sizes = answer.goal.gpus, parameter_count(setup.spec), setup.seq_len
    return [Step(rule, rule.asked(*sizes), answer.best_with(rule.given)) for rule in RULES]


def chosen_by_recipe(steps: list[Step]) -> Step | None:
    """Where the recipe ends: of the rules that apply, the one whose layout is the fastest that fits."""
    applying = [step for step in steps if step.asked and step.searched.best]
    return min(applying, key=lambda step: step.searched.best[0].step_time, default=None)
