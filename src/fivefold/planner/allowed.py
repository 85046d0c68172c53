"""Settings that change what is computed, where the user allows them: whether they pay.

Layouts compute the same numbers; compressed gradients and local steps do not. So a plan takes them only where
it is told that it may, and says what they gain over the fastest layout without them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fivefold.config.local_steps import DEFAULTS
from fivefold.planner.answer import Answer
from fivefold.problems import BadInput, Problem, did_you_mean

PAYS = 1.02
"""How many times as fast a setting must be: less is within what a plan can tell."""
LOCAL_STEPS = 20
"""How many steps replicas take alone where local steps are allowed and no number is given."""
CHOICES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "bf16": ({"compress": "bf16"}, {"compress": "bf16", "compress_on": "replicate"}),
    "int8": ({"compress": "int8"}, {"compress": "int8", "compress_on": "replicate"}),
    "local": ({"local_steps": LOCAL_STEPS},),
}
"""By what `--allow` calls it, settings of `communication` of which the fastest is taken."""


@dataclass(frozen=True)
class Allowed:
    """The fastest layout with one of these settings.

    settings  keys of `communication`
    answer    what the search says with them; without a layout where none fits
    gain      how many times as fast the best layout is as the best without; None where either does not fit
    """

    name: str
    settings: Mapping[str, Any]
    answer: Answer
    gain: float | None

    @property
    def pays(self) -> bool:
        return self.gain is None or self.gain >= PAYS

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of a job."""
        return {f"communication.{key}": value for key, value in self.settings.items()}

    def sentence(self, plain: Answer) -> str:
        """Whether it pays, in words."""
        words = " ".join(f"--{key} {value}" for key, value in self.keys.items())
        if self.answer.best is None:
            return f"{self.name}: no layout fits with {words}."
        if plain.best is None:
            return f"{self.name}: fits with {words}, where nothing fits without."
        step, gain = self.answer.best.step_time, self.gain or 1.0
        if self.pays:
            return f"{self.name} pays: {step:.4g} s a step, {gain:.2f} times as fast, with {words}."
        exposed = sum(plain.best.breakdown.exposed.values()) / plain.best.step_time
        return (
            f"{self.name} does not pay: {step:.4g} s a step, {gain:.2f} times as fast. "
            f"Without it messages hold up {exposed:.1%} of a step."
        )

    def as_json(self) -> dict[str, Any]:
        best = self.answer.best
        row = None if best is None else self.answer.row(best)
        return {"settings": self.keys, "gain": self.gain, "pays": self.pays, "best": row}


def read_allowed(text: str | None) -> list[str]:
    """What `--allow` names: `int8,local`. Raises `BadInput`."""
    names = [word.strip() for word in text.split(",")] if text is not None else []
    unknown = next((name for name in names if name not in CHOICES), None)
    if unknown is not None:
        hint = did_you_mean(unknown, CHOICES)
        raise BadInput([Problem("--allow", f"'{unknown}' is not known", hint)])
    return list(dict.fromkeys(names))


def allowed(name: str, plain: Answer) -> Allowed:
    """The fastest of what a name stands for, beside the answer without it."""
    found = []
    for settings in CHOICES[name]:
        outer = DEFAULTS if "local_steps" in settings else {}
        answer = replace(plain, goal=plain.goal.changed(**settings, **outer))
        found.append((settings, answer))
    fitting = [pair for pair in found if pair[1].best is not None]
    settings, answer = min(fitting, key=_seconds) if fitting else found[0]
    gain = plain.best.step_time / answer.best.step_time if plain.best and answer.best else None
    return Allowed(name, settings, answer, gain)


def fastest(plain: Answer, variants: Sequence[Allowed]) -> tuple[Answer, dict[str, Any]]:
    """The answer to train by, and its settings as keys of a job: with what is allowed only where it pays."""
    paying = [variant for variant in variants if variant.answer.best is not None and variant.pays]
    if not paying:
        return plain, {}
    best = min(paying, key=lambda variant: _seconds((variant.settings, variant.answer)))
    return best.answer, best.keys


def _seconds(found: tuple[Mapping[str, Any], Answer]) -> float:
    best = found[1].best
    assert best is not None
    return best.step_time
