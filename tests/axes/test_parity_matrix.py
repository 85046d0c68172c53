"""The whole matrix of data layouts against one process: `make test-all`.

`test_parity.py` has the cases that each say one thing; here are all of them together, on 4 ranks, and some
drawn at random on 8, so that no case is special.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from typing import Any

import pytest

from fivefold.training.ranks import run_ranks
from fivefold.verification import gradient_error
from tests.axes.test_parity import all_gradients, all_losses
from tests.cases import SPEC, TIED, Case, gradients, losses

pytestmark = pytest.mark.slow

SPECS = {"untied": SPEC, "tied": TIED}
MODES = ("none", "full", "every-2", "selective")


def data_layouts(ranks: int) -> list[dict[str, Any]]:
    """Every ZeRO stage on every way to factor the ranks into copies and shards."""
    found: list[dict[str, Any]] = [{"zero": 0}]
    for replicate in (n for n in range(1, ranks) if ranks % n == 0):
        for zero in (1, 2, 3):
            layout = {"zero": zero, "dp_replicate": replicate, "dp_shard": ranks // replicate}
            found.append(layout)
            if zero > 1:
                found.append(layout | {"reduce": "step"})
    return found


def cases(ranks: int) -> dict[str, Case]:
    batch = 16
    found = {}
    for (name, spec), layout, repeats, mode in product(SPECS.items(), data_layouts(ranks), (1, 2, 4), MODES):
        if batch % (ranks * repeats):
            continue
        training = {"global_batch": batch, "micro_batch": batch // (ranks * repeats), "recompute": mode}
        degrees = " ".join(f"{key}={value}" for key, value in layout.items())
        label = f"{name} {degrees} accumulate={repeats} {mode}"
        found[label] = Case(label, ranks, layout, training, spec=spec)
    return found


FOUR = cases(4)
EIGHT = dict(random.Random(0).sample(sorted(cases(8).items()), 24))


@cache
def found_gradients(ranks: int) -> dict[str, Any]:
    """Several launches: every case makes process groups, and their threads live as long as the ranks."""
    chosen = list((FOUR if ranks == 4 else EIGHT).items())
    found: dict[str, Any] = {}
    for start in range(0, len(chosen), 32):
        names, some = zip(*chosen[start : start + 32], strict=True)
        found |= dict(zip(names, run_ranks(all_gradients, ranks, [c.job() for c in some])[0], strict=True))
    return found


@cache
def reference(spec: str) -> dict[str, Any]:
    return gradients(Case("reference", training={"global_batch": 16}, spec=SPECS[spec]).job())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*FOUR, *EIGHT])
def test_every_gradient_is_that_of_one_process(name: str) -> None:
    case = FOUR.get(name) or EIGHT[name]
    found, true = found_gradients(case.ranks)[name], reference(name.split()[0])
    error, parameter = gradient_error(found["gradients"], true["gradients"])
    assert error <= 1e-12, f"{parameter} is off by {error:.1e}"
    assert found["loss"] == pytest.approx(true["loss"], rel=1e-12)
    assert found["norm"] == pytest.approx(true["norm"], rel=1e-12)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("spec", SPECS)
def test_twenty_adamw_steps_lose_alike(spec: str) -> None:
    jobs = [
        Case("curve", 4, layout, {"micro_batch": 1, "recompute": "full"}, spec=SPECS[spec]).job()
        for layout in data_layouts(4)
    ]
    true = losses(Case("reference", spec=SPECS[spec]).job())
    for layout, curve in zip(data_layouts(4), run_ranks(all_losses, 4, jobs)[0], strict=True):
        for (loss, norm), (true_loss, true_norm) in zip(curve, true, strict=True):
            assert loss == pytest.approx(true_loss, rel=1e-10), layout
            assert norm == pytest.approx(true_norm, rel=1e-9), layout
