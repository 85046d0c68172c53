"""What a person wants to know before the first step: how large the model is, and how much data there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.models.inventory import parameter_count

if TYPE_CHECKING:
    from fivefold.config import Job
    from fivefold.data.corpus import Corpus

UNITS = {1e12: "T", 1e9: "B", 1e6: "M", 1e3: "K"}


def sizes(job: Job, corpus: Corpus) -> dict[str, str]:
    """Parameters, tokens in the data, and how often the run goes through them; of a mix, for each source.

    Tokens are those that are trained on, without what is held out. Random tokens have no end: no epochs.
    """
    told = {"parameters": short(parameter_count(job.spec))}
    samples, slots = job.training.steps * job.training.global_batch, corpus.order.counts
    finite = [(part, n) for part, n in zip(corpus.parts, slots, strict=True) if part.cache is not None]
    if not finite:
        return told | {"data": "random tokens"}
    told["data"] = f"{short(sum(len(part.train) for part, _ in finite) * corpus.seq_len)} tokens"
    epochs = [(part.name, samples * n / sum(slots) / len(part.train)) for part, n in finite]
    if len(corpus.parts) == 1:
        return told | {"epochs": times(epochs[0][1])}
    return told | {"epochs": ", ".join(f"{times(seen)} of {name}" for name, seen in epochs)}


def times(number: float) -> str:
    """How often something is gone through: `0.34`, `120`, `under 0.001`."""
    return "under 0.001" if number < 1e-3 else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def short(number: float) -> str:
    """`405.9B`, `1.26M`, `512`: four digits at most."""
    for unit, letter in UNITS.items():
        if number >= 0.9995 * unit:
            scaled = number / unit
            return f"{scaled:.1f}{letter}" if scaled >= 100 else f"{scaled:.3g}{letter}"
    return str(round(number))
