"""How two runs are compared, and how the outcome is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from fivefold.verification import Verdict, gradient_error
from fivefold.verification.compare import Difference, InFloat64, by_quantity, differences
from fivefold.verification.compute import Computed, Taken
from fivefold.verification.verdict import Part


def test_the_error_is_relative_to_each_parameter_but_not_to_vanishing_ones() -> None:
    reference = {"large": torch.tensor([1.0, -4.0]), "vanishing": torch.tensor([1e-9, 0.0])}
    found = {"large": torch.tensor([1.0, -4.1]), "vanishing": torch.tensor([2e-9, 0.0])}
    error, name = gradient_error(found, reference)
    assert name == "large"
    assert error == pytest.approx(0.025)
    error, name = gradient_error({**reference, "vanishing": torch.tensor([5e-3, 0.0])}, reference)
    assert name == "vanishing"
    assert error == pytest.approx(1.25)


def test_a_missing_or_undefined_gradient_is_the_worst_of_all() -> None:
    reference = {"a": torch.ones(2), "b": torch.ones(2)}
    assert gradient_error({"a": torch.ones(2)}, reference) == (math.inf, "b")
    error, name = gradient_error({"a": torch.ones(2) * 9, "b": torch.tensor([1.0, math.nan])}, reference)
    assert name == "b"
    assert not error <= 1.0


def ran(**changes: object) -> Computed:
    """Numbers as a run could have left them, the same each time but for `changes`."""
    torch.manual_seed(0)
    weights = {"a": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64)}
    step = Taken(4.0, 2.0, weights, {name: g / 20 for name, g in weights.items()})
    bias = {"blocks.0.mlp.bias": torch.tensor([1.0, -1.0, 0.0])}
    return replace(Computed([step, step], weights, weights, weights, bias, 4.5), **changes)  # type: ignore[arg-type]


def test_every_quantity_of_every_step_is_compared() -> None:
    reference = ran()
    assert all(each.ok for each in differences(reference, ran(), InFloat64()))
    off = {name: g * (1 + 1e-9) for name, g in reference.moved.items()}
    first, second = reference.steps
    wrong = {
        "gradient": ran(steps=[first, replace(second, gradients=off)]),
        "gradient norm": ran(steps=[first, replace(second, grad_norm=2.0 + 1e-9)]),
        "loss": ran(steps=[replace(first, loss=4.0 + 1e-9), second]),
        "gradient that the optimizer gets": ran(steps=[first, replace(second, clipped=off)]),
        "update": ran(moved=off),
        "update of the average": ran(averaged=off),
        "balancing bias": ran(biases={"blocks.0.mlp.bias": torch.tensor([1.0, -1.0, 1.0])}),
        "held-out loss": ran(heldout=math.nan),
    }
    for quantity, found in wrong.items():
        seen = [each.quantity for each in differences(found, reference, InFloat64()) if not each.ok]
        assert seen == [quantity]
    assert set(by_quantity(differences(reference, reference, InFloat64()))) == set(wrong)


def test_the_worst_of_a_quantity_is_kept_even_if_it_is_no_number() -> None:
    each = [Difference("loss", error, 1.0) for error in (0.5, math.nan, 0.25)]
    assert math.isnan(by_quantity(each)["loss"].error)
    assert by_quantity(each[::2])["loss"].error == 0.5


def test_a_verdict_without_a_number_is_still_json() -> None:
    nan = math.nan
    wrong = Difference("gradient", nan, 1e-11, "head.norm.weight", 1, nan, 4.0)
    part = Part("fp64", "cpu", [wrong])
    verdict = Verdict(
        *(False, nan, "head.norm.weight", 3, nan, 4.0, math.inf, 2.0, "dp_shard", "dp_shard2"),
        parts=[part],
        shrunk={"model.layers": (8, 2)},
    )
    told = json.loads(json.dumps(verdict.as_json(), allow_nan=False))
    assert (told["worst_gradient_error"], told["loss"], told["reference_loss"]) == (None, None, 4.0)
    assert told["precision"]["fp64"]["compared"]["gradient"]["worst"] is None
    assert told["shrunk"] == {"model.layers": {"from": 8, "to": 2}}
    assert "head.norm.weight is off by nan" in verdict.sentence()
