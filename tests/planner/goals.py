"""Goals as tests ask for them: with what is left open filled in as `plan` does."""

from __future__ import annotations

from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Setup
from fivefold.models.spec import ModelSpec
from fivefold.planner.goal import USUAL_LENGTH, Goal, usual_batch


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
