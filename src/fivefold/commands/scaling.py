"""`fivefold scaling`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.common import AsJson, print_json, print_table, reporting
from fivefold.problems import BadInput, Problem, did_you_mean

if TYPE_CHECKING:
    from fivefold.planner.scaling import Fit, Optimum


def scaling(
    compute: Annotated[str | None, typer.Option(help="Operations to spend: 1e24.")] = None,
    params: Annotated[str | None, typer.Option(help="Parameters of the model: 70B.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on: 1.4T.")] = None,
    gpus: Annotated[int | None, typer.Option(help="How many devices: adds the days it takes.")] = None,
    device: Annotated[str, typer.Option(help="Which device: H100, A100, B200, ...")] = "H100",
    mfu: Annotated[
        float, typer.Option(help="Fraction of its dense 16-bit peak that training is assumed to reach.")
    ] = 0.4,
    fit: Annotated[
        str, typer.Option(help="Whose fit: besiroglu-2024, hoffmann-2022 or hoffmann-2022-unrounded.")
    ] = "besiroglu-2024",
    as_json: AsJson = False,
) -> None:
    """Say how large a model and how many tokens make the best use of a budget.

    Give one of --compute, --params and --tokens; the other two follow by minimising a fitted loss at a fixed
    6 x params x tokens operations. Fits disagree: all are shown, --fit chooses the one that JSON leads with.

    \b
    Examples:
      fivefold scaling --compute 1e24
      fivefold scaling --params 70B --device A100 --mfu 0.45
      fivefold scaling --tokens 15T --gpus 16384 --json
    """
    with reporting(as_json):
        from fivefold.planner.scaling import FITS, device_named, gpu_hours, half_peak, optimum

        given = _given(compute, params, tokens)
        _check(gpus, mfu, fit, list(FITS))
        chosen = device_named(device)
        answers = {name: optimum(**given, fit=each) for name, each in FITS.items()}
        hours = {name: gpu_hours(best.compute, chosen, mfu) for name, best in answers.items()}
        if as_json:
            told = {name: _told(name, answers[name], hours[name], gpus) for name in FITS}
            assumed = {"mfu_assumed": mfu, "device": chosen.name, "peak_flops": half_peak(chosen)}
            others = [told[name] for name in FITS if name != fit]
            print_json({**told[fit], **assumed, "gpus": gpus, "others": others})
            return
        _print(FITS, answers, hours, gpus)
        print(
            f"\nGPU-hours: {chosen.name} at {mfu:.0%} of {half_peak(chosen) / 1e12:,.4g} TFLOP/s (assumed)."
        )
        print("Parameters and tokens are those of least loss. 6 x params x tokens leaves attention out.")


def _given(compute: str | None, params: str | None, tokens: str | None) -> dict[str, float]:
    """The one quantity that was given, by name."""
    from fivefold.planner.scaling import quantity

    texts = {"compute": compute, "params": params, "tokens": tokens}
    given = {name: text for name, text in texts.items() if text is not None}
    if len(given) != 1:
        words = " and ".join(f"--{name} {text}" for name, text in given.items()) or "none of them"
        hint = "Give one: the other two follow from it."
        raise BadInput([Problem("--compute, --params, --tokens", f"got {words}", hint)])
    return {name: quantity(f"--{name}", text) for name, text in given.items()}


def _check(gpus: int | None, mfu: float, fit: str, known: list[str]) -> None:
    problems = []
    if gpus is not None and gpus < 1:
        problems.append(Problem("--gpus", f"{gpus} devices", "Give 1 or more."))
    if not 0 < mfu <= 1:
        problems.append(Problem("--mfu", f"{mfu:g} is not a fraction", "Above 0, at most 1: 0.4 is usual."))
    if fit not in known:
        problems.append(Problem("--fit", f"'{fit}' is not known", did_you_mean(fit, known)))
    if problems:
        raise BadInput(problems)


def _told(fit: str, best: Optimum, hours: float, gpus: int | None) -> dict[str, Any]:
    return {
        "compute_flops": best.compute,
        "params": best.params,
        "tokens": best.tokens,
        "tokens_per_param": best.tokens_per_param,
        "loss": best.loss,
        "gpu_hours": hours,
        "days": None if gpus is None else hours / gpus / 24,
        "fit": fit,
    }


def _print(
    fits: dict[str, Fit], answers: dict[str, Optimum], hours: dict[str, float], gpus: int | None
) -> None:
    header = ["fit", "compute", "parameters", "tokens", "tokens/parameter", "loss", "GPU-hours"]
    rows = [
        [
            name,
            f"{best.compute:.3g}",
            _short(best.params),
            _short(best.tokens),
            f"{best.tokens_per_param:.1f}",
            f"{best.loss:.3f}",
            f"{hours[name]:,.0f}" if hours[name] >= 100 else f"{hours[name]:.3g}",
        ]
        for name, best in answers.items()
    ]
    if gpus is not None:
        header.append(f"days on {gpus:,}")
        for row, name in zip(rows, fits, strict=True):
            row.append(f"{hours[name] / gpus / 24:,.3g}")
    print_table(header, rows)


def _short(value: float) -> str:
    """1.4T, 70B: three digits and the largest suffix that leaves a number of at least 1."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:,.3g}{suffix}" if value < 1000 * size else f"{value / size:,.0f}{suffix}"
    return f"{value:.3g}"
