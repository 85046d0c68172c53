"""What a job says of its optimizer: defaults, and settings of another one."""

from fivefold.config.complain import shown
from fivefold.config.schema import Optimizer
from fivefold.problems import Problem

MOMENTUM = {"sgd": 0.9, "muon": 0.95}
"""By optimizer, the usual one; AdamW has moments instead."""


def filled(given: Optimizer) -> Optimizer:
    """With the open number filled in, where the optimizer has it."""
    if given.momentum is not None:
        return given
    return given.model_copy(update={"momentum": MOMENTUM.get(given.name)})


def problems(given: Optimizer) -> list[Problem]:
    """Settings that would be without effect."""
    if given.momentum is None or given.name in MOMENTUM:
        return []
    message = f"{shown(given.momentum)} with optimizer.name = '{given.name}', which has betas instead"
    return [Problem("optimizer.momentum", message, "Leave it out, or set optimizer.name to 'sgd' or 'muon'.")]
