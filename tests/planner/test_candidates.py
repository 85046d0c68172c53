"""The planner looks at every layout that a job could have, once, and at no other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fivefold.axes.checks import check
from fivefold.config import Job, resolve
from fivefold.ledger.numbers import divisors
from fivefold.models.presets import PRESETS
from fivefold.planner.goal import Goal
from fivefold.planner.keys import as_job, as_sections
from fivefold.planner.play.arrays import taken
from fivefold.planner.search.candidates import Choices, candidates
from fivefold.problems import BadInput
from tests.planner.goals import goal_for

FEW_SCHEDULES = ("1f1b", "zbv")
FEW = Choices(zero=(0, 1, 3), schedule=FEW_SCHEDULES, recompute=("none", "selective"), cp_kind=("ring",))


Keys = tuple[tuple[str, object], ...]


def layouts(goal: Goal, choices: Choices) -> list[Keys]:
    """Every candidate, as a tuple of all that was chosen for it."""
    found: list[Keys] = []
    for setup in candidates(goal, choices):
        for row in range(np.size(setup.pp)):
            one = taken(setup, row)
            sections = as_sections(one)
            keys = {**sections["layout"], **sections["training"]}
            del keys["compile"]
            found.append(tuple(sorted(keys.items())))
    return found


@pytest.mark.parametrize(("model", "gpus"), [("tiny", 4), ("tiny-moe", 4), ("tiny", 6)])
def test_all_that_a_job_allows_is_there_once_and_nothing_else(model: str, gpus: int) -> None:
    goal = goal_for(PRESETS[model], gpus, seq_len=64, global_batch=12, precision="fp32")
    choices = replace(FEW, micro_batch=(1, 2, 3), virtual_stages=(2,))
    found = layouts(goal, choices)
    assert len(found) == len(set(found))
    assert set(found) == set(by_brute_force(goal, choices, model))


def by_brute_force(goal: Goal, choices: Choices, model: str) -> list[Keys]:
    """Every combination of keys that `resolve` and `check` take."""
    found: list[Keys] = []
    degrees = divisors(goal.gpus)
    for pp, replicate, shard, cp, tp in itertools.product(degrees, repeat=5):
        if pp * replicate * shard * cp * tp != goal.gpus:
            continue
        for ep, zero, size in itertools.product((1, 2, 4), choices.zero, (1, 2, 3)):
            for schedule, recompute in itertools.product(FEW_SCHEDULES, choices.recompute):
                if (pp == 1 and schedule != FEW_SCHEDULES[0]) or (zero and shard * cp == 1):
                    continue
                layout: dict[str, object] = {
                    "pp": pp,
                    "dp_replicate": replicate,
                    "dp_shard": shard,
                    "cp": cp,
                    "tp": tp,
                }
                layout |= {"ep": ep, "zero": zero}
                layout |= {"cp_kind": "ring"} if cp > 1 else {}
                if pp > 1:
                    layout |= {"schedule": schedule, "virtual_stages": 2 if schedule == "zbv" else 1}
                training: dict[str, object] = {
                    "micro_batch": size,
                    "recompute": recompute,
                    "seq_len": goal.setup.seq_len,
                }
                training |= {"global_batch": goal.setup.global_batch}
                job = {"model": {"preset": model}, "layout": layout, "training": training}
                try:
                    resolved = resolve(Job.model_validate(job), goal.gpus)
                except BadInput:
                    continue
                if not check(resolved):
                    keys = {**layout, "micro_batch": size, "recompute": recompute}
                    keys |= {"sequence_parallel": True} if tp > 1 else {}
                    found.append(tuple(sorted(keys.items())))
    return found


def test_a_candidate_becomes_a_job_that_is_allowed() -> None:
    goal = goal_for(PRESETS["tiny"], 8, seq_len=64, global_batch=16, precision="fp32")
    base = Job.model_validate({"training": {"seq_len": 64, "global_batch": 16}})
    generator = np.random.default_rng(0)
    for setup in candidates(goal, FEW):
        one = taken(setup, int(generator.integers(np.size(setup.pp))))
        job = resolve(as_job(one, base), 8)
        assert check(job) == []
        assert as_sections(one)["layout"].items() <= job.layout.model_dump().items()


def test_a_prime_number_of_devices_has_candidates_where_the_batch_divides() -> None:
    assert not list(candidates(goal_for(PRESETS["tiny"], 13, seq_len=64, global_batch=16), FEW))
    found = list(candidates(goal_for(PRESETS["tiny"], 13, seq_len=64, global_batch=26), FEW))
    assert {int(n) for setup in found for n in np.asarray(setup.dp_shard * setup.dp_replicate)} == {13}
