"""What is to be planned: a model, a batch, and how many devices of which kind."""

from dataclasses import dataclass, replace
from typing import Any, Self

from fivefold.config import Job, local_steps, optimizers
from fivefold.config.conditions import offload_fits
from fivefold.hardware.devices import DeviceKind
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count
from fivefold.models.spec import ModelSpec
from fivefold.planner.keys import DEGREES

USUAL_LENGTH = 8192
USUAL_BATCH = 4 * 2**20
TOKENS_A_DEVICE = 1024
SMALL_MODEL = 100_000_000
SMALL_BATCH = 32
FEW = 8
"""Devices for which states in host memory are proposed: more of them have room between them."""
UNSPLIT = {**dict.fromkeys(DEGREES, 1), "zero": 0, "schedule": None, "virtual_stages": None, "cp_kind": None}


@dataclass(frozen=True)
class Goal:
    """What is trained, on how many devices.

    setup  what all layouts share: model, batch, precision, optimizer, settings of communication; unsplit
    may_compile  a layout may also be compiled where that is faster
    """

    setup: Setup
    gpus: int
    may_compile: bool = False

    def changed(self, **settings: Any) -> Self:
        """The same goal with other values in its setup."""
        return replace(self, setup=replace(self.setup, **settings))

    @property
    def tokens(self) -> int:
        """Tokens in one optimizer step."""
        return self.setup.global_batch * self.setup.seq_len


def goal_of(job: Job, ranks: int, kind: DeviceKind) -> Goal:
    """What a job asks of a planner."""
    precision = job.training.precision or job.training.usual_precision(kind)
    plain = {"micro_batch": 1, "recompute": "none", "precision": precision}
    layout, training = job.layout.model_copy(update=UNSPLIT), job.training.model_copy(update=plain)
    sections = {
        "layout": layout,
        "training": training,
        "communication": local_steps.filled(job.communication),
        "optimizer": optimizers.filled(job.optimizer),
    }
    return Goal(Setup.of(job.model_copy(update=sections)), ranks)


def may_offload(goal: Goal, kind: DeviceKind) -> bool:
    """Whether optimizer states could lie in host memory, and do not yet, and it is worth proposing."""
    setup = goal.setup
    fits = kind == "cuda" and offload_fits(True, setup.optimizer, setup.outer_steps)
    return fits and not setup.offload and goal.gpus <= FEW


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
