"""The optimizer: update rules for this rank's master weights, and the moving average of these."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.axes.matrices import is_matrix
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm.compat import move_each
from fivefold.config import Job
from fivefold.ledger.precision import moments_in, precision_named
from fivefold.training.launches import has_kernels
from fivefold.training.updates.adamw import AdamW
from fivefold.training.updates.by_torch import TorchUpdate
from fivefold.training.updates.muon import Muon
from fivefold.training.updates.offloaded import Offloaded
from fivefold.training.updates.update import Update
from fivefold.training.weights import Weights


class Optimizer:
    """Updates the masters from their gradients, each by one rule.

    job, mesh  of all ranks that take its steps together: where replicas train alone, of one
    """

    def __init__(self, job: Job, weights: Weights, mesh: Mesh):
        self.settings, self.weights = job.optimizer, weights
        self.offloaded = offloaded(job, weights) if job.optimizer.offload else None
        self.updates = update_rules(job, weights, mesh) if self.offloaded is None else [self.offloaded]
        self.update_of = {index: update for update in self.updates for index in update.indices}
        self.ema: list[Tensor] | None = None
        if self.offloaded is not None:
            self.ema = self.offloaded.averages
        elif self.settings.ema is not None:
            self.ema = [master.detach().clone() for master in weights.masters]

    def step(self, lr: float, scale: Tensor | None = None) -> None:
        """One update at learning rate `lr`, then hand the new weights to the model.

        scale  what the gradients are multiplied by before: a scalar on their device
        """
        for update in self.updates:
            update.step(lr, scale)
        if self.ema is not None and self.settings.ema is not None and self.offloaded is None:
            with torch.no_grad():
                move_each(self.ema, self.weights.masters, 1 - self.settings.ema)
        left = [update.indices for update in self.updates if not update.publishes]
        self.weights.publish(index for indices in left for index in indices)

    def state(self) -> dict[str, dict[str, Any]]:
        """By parameter name: its states (and averaged weights), as distributed tensors where sharded.

        States are made where there are none yet, so that a checkpoint can be loaded before the first step.
        """
        found: dict[str, dict[str, Any]] = {}
        for index, name in enumerate(self.weights.names):
            update = self.update_of[index]
            found[name] = {
                kind: self.weights.whole_like(index, value) if kind in update.kinds else value
                for kind, value in update.states(index).items()
            }
            if self.ema is not None:
                found[name]["ema"] = self.weights.whole_like(index, self.ema[index])
        return found

    @torch.no_grad()
    def restart_average(self) -> None:
        """Let the average begin with the weights as they are now."""
        for average, master in zip(self.ema or [], self.weights.masters if self.ema else [], strict=True):
            average.copy_(master)

    def tensors_of(self, index: int) -> list[Tensor]:
        """What is kept for one master: states, averaged weights."""
        kept = self.update_of[index].tensors_of(index)
        return kept + ([] if self.ema is None else [self.ema[index]])

    def tensors(self) -> list[Tensor]:
        """Every tensor this optimizer keeps on this rank."""
        return [tensor for index in self.update_of for tensor in self.tensors_of(index)]


def update_rules(job: Job, weights: Weights, mesh: Mesh) -> list[Update]:
    """Which rule updates which of this rank's masters; each is in one of them."""
    every = range(len(weights.masters))
    if job.optimizer.name == "sgd":
        return [by_torch(job, weights, every)]
    if job.optimizer.name == "adamw":
        return [adamw(job, weights, every)]
    named = zip(weights.names, weights.parameters, strict=True)
    matrices = [is_matrix(job.spec, name, parameter.shape) for name, parameter in named]
    # A stage without matrices has the rule too: ranks make its process groups together.
    rules: list[Update] = [Muon(job, weights, mesh, [index for index in every if matrices[index]])]
    if others := [index for index in every if not matrices[index]]:
        rules.append(adamw(job, weights, others))
    return rules


def offloaded(job: Job, weights: Weights) -> Offloaded:
    """The rule of all masters, with what it keeps in host memory."""
    every = range(len(weights.masters))
    rule = by_torch(job, weights, every) if job.optimizer.name == "sgd" else adamw(job, weights, every)
    return Offloaded(rule, weights, job.optimizer.ema)


def adamw(job: Job, weights: Weights, indices: Sequence[int]) -> TorchUpdate | AdamW:
    """AdamW of some masters: one pass of our own, or torch's, of which ours has the formula.

    On a CPU torch's is the quicker one; and ours is in float32. Moments in fewer bits are ours alone.
    """
    if job.optimizer.states == "fp32" and not has_kernels(weights.device, weights.masters[0].dtype):
        return by_torch(job, weights, indices)
    dtype = moments_in(job.optimizer.states, precision_named(job.training.precision))
    return AdamW(job, weights, indices, getattr(torch, dtype))


def by_torch(job: Job, weights: Weights, indices: Sequence[int]) -> TorchUpdate:
    """AdamW or SGD of some masters, as torch has them."""
    decays = [parameter.dim() >= 2 for parameter in weights.parameters]
    return TorchUpdate(job.optimizer, weights.masters, decays, indices)
