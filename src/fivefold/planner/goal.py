"""What is to be planned: a model, a batch, and how many devices of which cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fivefold.ledger.precision import Precision, precision_named
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count
from fivefold.models.spec import ModelSpec

USUAL_LENGTH = 8192
USUAL_BATCH = 4 * 2**20
TOKENS_A_DEVICE = 1024
SMALL_MODEL = 100_000_000
SMALL_BATCH = 32


@dataclass(frozen=True)
class Goal:
    """What is trained, on how many devices.

    setup  what all layouts share: model, batch, precision, optimizer, settings of communication; unsplit
    may_compile  a layout may also be compiled where that is faster
    """

    setup: Setup
    gpus: int
    may_compile: bool = False

    @property
    def spec(self) -> ModelSpec:
        return self.setup.spec

    @property
    def seq_len(self) -> int:
        return self.setup.seq_len

    @property
    def global_batch(self) -> int:
        """Sequences in one optimizer step."""
        return self.setup.global_batch

    @property
    def precision(self) -> Precision:
        return self.setup.precision

    def changed(self, **settings: Any) -> Goal:
        """The same goal with other values in its setup."""
        return replace(self, setup=replace(self.setup, **settings))

    @property
    def tokens(self) -> int:
        """Tokens in one optimizer step."""
        return self.global_batch * self.seq_len


def usual_batch(spec: ModelSpec, seq_len: int, gpus: int) -> int:
    """The batch that is planned for when none is given, in sequences.

    About 4 million tokens, and at least 1,024 a device (Llama 3 405B: 16 million on 16,384 devices). For
    models that are too small to be trained like that, a job's own default of 32 sequences. Then as many
    more as let all devices, or an even share of them, have as much.
    """
    small = parameter_count(spec) < SMALL_MODEL
    tokens = max(USUAL_BATCH, TOKENS_A_DEVICE * gpus)
    batch = max(SMALL_BATCH, gpus) if small else max(1, tokens // seq_len)
    odd = gpus // (gpus & -gpus)
    unit = gpus if gpus <= batch else min(gpus, 8 * odd)
    return -(-batch // unit) * unit


def goal_for(
    spec: ModelSpec,
    gpus: int,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: str = "bf16",
) -> Goal:
    """A goal, with what was left open filled in."""
    seq_len = seq_len or min(spec.max_seq_len, USUAL_LENGTH)
    batch = global_batch or usual_batch(spec, seq_len, gpus)
    return Goal(Setup(spec, seq_len, batch, precision_named(precision)), gpus)
