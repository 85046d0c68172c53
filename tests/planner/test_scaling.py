"""Scaling laws: the closed form against a search, against the papers' own figures; and the verb."""

from __future__ import annotations

import json
import math
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.planner.scaling import (
    FITS,
    device_named,
    gpu_hours,
    optimum,
    quantity,
)
from fivefold.problems import BadInput

every_fit = pytest.mark.parametrize("fit", FITS.values(), ids=FITS)


@every_fit
@pytest.mark.parametrize("compute", [1e18, 5.76e23, 3.8e25])
def test_no_split_of_a_budget_has_less_loss(fit, compute):
    best = optimum(compute=compute, fit=fit)
    params = best.params * np.geomspace(0.01, 100, 401)
    losses = [fit.loss(count, compute / 6 / count) for count in params]
    assert np.argmin(losses) == 200
    assert losses[200] == pytest.approx(best.loss)
    assert best.compute == pytest.approx(compute)


@every_fit
@settings(deadline=None)
@given(exponent=st.floats(17, 27))
def test_the_three_questions_have_one_answer(fit, exponent):
    best = optimum(compute=10**exponent, fit=fit)
    for same in (optimum(params=best.params, fit=fit), optimum(tokens=best.tokens, fit=fit)):
        assert same.compute == pytest.approx(best.compute, rel=1e-6)
        assert same.params == pytest.approx(best.params, rel=1e-6)
        assert same.loss == pytest.approx(best.loss)


def test_exactly_one_question_at_a_time():
    with pytest.raises(ValueError, match="give one"):
        optimum()
    with pytest.raises(ValueError, match="give one"):
        optimum(params=1e9, tokens=1e9)


def test_what_is_given_comes_back_as_it_was():
    assert optimum(params=70e9).params == 70e9
    assert optimum(tokens=15e12).tokens == 15e12


@pytest.mark.parametrize(("fit", "least", "most"), [("hoffmann-2022", 50, 139), ("besiroglu-2024", 16, 22)])
def test_tokens_a_parameter_from_a_small_budget_to_llama_3_s(fit, least, most):
    """1e21 operations, and the 3.8e25 of Llama 3 405B: the printed fit drifts far off the rule of 20."""
    ratios = [optimum(compute=compute, fit=FITS[fit]).tokens_per_param for compute in (1e21, 3.8e25)]
    assert min(ratios) == pytest.approx(least, abs=0.6)
    assert max(ratios) == pytest.approx(most, abs=0.6)


def test_chinchilla_is_what_the_refit_would_have_trained():
    """70B and 1.4T at Gopher's 5.76e23; Hoffmann et al.'s own third approach says 40B."""
    refit = optimum(compute=5.76e23)
    assert refit.params == pytest.approx(70e9, rel=0.05)
    assert refit.tokens == pytest.approx(1.4e12, rel=0.06)
    assert optimum(compute=5.76e23, fit=FITS["hoffmann-2022-unrounded"]).params == pytest.approx(
        40e9, rel=0.01
    )


def test_hours_are_operations_over_the_rate():
    assert gpu_hours(8.4e23, device_named("A100"), 0.4) == pytest.approx(8.4e23 / (312e12 * 0.4) / 3600)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100", "H100 SXM"),
        ("h100", "H100 SXM"),
        ("A100", "A100 SXM 40GB"),
        ("H100 PCIe", "H100 PCIe"),
        ("B200", "B200"),
    ],
)
def test_a_family_is_its_first_member(name, found):
    assert device_named(name).name == found


def test_a_device_without_16_bit_products_is_refused():
    with pytest.raises(BadInput, match="no 16-bit"):
        gpu_hours(1e20, device_named("K40"), 0.4)


# --- numbers as people write them --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("70e9", 70e9),
        ("70B", 70e9),
        ("1.4T", 1.4e12),
        ("1_000", 1e3),
        ("2,048", 2048),
        (" 7 b ", 7e9),
        ("1E24", 1e24),
    ],
)
def test_quantities(text, value):
    assert quantity("--tokens", text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "B", "-3", "0", "0B", "nan", "inf", "1e999", "7X", "1.2.3", "7 BB", "e9", "_", "."]
)
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(BadInput, match="--params"):
        quantity("--params", text)


@settings(deadline=None)
@given(st.floats(1e-3, 1e30), st.sampled_from(["", "K", "M", "B", "T", "P"]))
def test_any_number_with_any_suffix(value, suffix):
    factor = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15}[suffix]
    assert quantity("--params", f"{value!r}{suffix}") == pytest.approx(value * factor)


@settings(deadline=None)
@given(st.text(max_size=12))
def test_no_text_breaks_the_reader(text):
    with suppress(BadInput):
        assert 0 < quantity("--params", text) < math.inf


# --- the verb ----------------------------------------------------------------------------------------------


def scaling(*words: str):
    return CliRunner().invoke(app, ["scaling", *words])


def test_the_verb_answers_in_json():
    result = scaling("--compute", "1e24", "--device", "A100", "--mfu", "0.5", "--gpus", "1000", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    best = optimum(compute=1e24)
    assert told["compute_flops"] == pytest.approx(1e24)
    assert (told["params"], told["tokens"], told["loss"]) == (best.params, best.tokens, best.loss)
    assert told["tokens_per_param"] == pytest.approx(best.tokens / best.params)
    assert told["gpu_hours"] == pytest.approx(1e24 / (0.5 * 312e12) / 3600)
    assert told["days"] == pytest.approx(told["gpu_hours"] / 24_000)
    assert (told["mfu_assumed"], told["fit"]) == (0.5, "besiroglu-2024")
    assert [other["fit"] for other in told["others"]] == ["hoffmann-2022", "hoffmann-2022-unrounded"]


def test_the_fit_is_the_user_s_choice():
    told = json.loads(scaling("--params", "70B", "--fit", "hoffmann-2022", "--json").stdout)
    assert told["fit"] == "hoffmann-2022"
    assert told["params"] == 70e9
    assert told["tokens_per_param"] > 100


def test_the_table_has_every_fit_and_the_assumption():
    text = scaling("--tokens", "1.4T", "--gpus", "64").stdout
    assert all(name in text for name in FITS)
    assert "H100 SXM at 40% of 989.4 TFLOP/s (assumed)" in text
    assert "days on 64" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "none of them"),
        (("--params", "7B", "--tokens", "1T"), "--params 7B and --tokens 1T"),
        (("--params", "seven"), "'seven' is not a quantity"),
        (("--params", "7B", "--mfu", "40"), "40 is not a fraction"),
        (("--params", "7B", "--gpus", "0"), "0 devices"),
        (("--params", "7B", "--fit", "besiroglu"), "Did you mean 'besiroglu-2024'?"),
        (("--params", "7B", "--device", "H200x"), "Did you mean 'H200'?"),
    ],
)
def test_bad_input_is_named(words, said):
    result = scaling(*words, "--json")
    assert result.exit_code == 2
    assert said in json.dumps(json.loads(result.stdout), ensure_ascii=False)
