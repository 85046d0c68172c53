"""The optimizer: AdamW or SGD over this rank's master weights, the learning-rate schedule, and the EMA."""

import math
from typing import Any

import torch

from fivefold.comm.compat import move_each
from fivefold.config import Job
from fivefold.config import Optimizer as Settings
from fivefold.training.weights import Weights


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """The rate for `step` (from 1) of `steps`: linear warm-up, then the schedule.

    cosine    half a cosine from lr down to min_lr * lr at the last step
    wsd       constant, then linear down to min_lr * lr over the last `decay` fraction of the steps
    constant  lr
    """
    warmup = min(settings.warmup, steps)
    if step <= warmup:
        return settings.lr * step / warmup
    floor = settings.lr * settings.min_lr
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "wsd":
        decay = max(1, round(settings.decay * steps))
        left = min(1.0, (steps - step) / decay)
        return floor + (settings.lr - floor) * left
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (settings.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Optimizer:
    """Updates the masters from their gradients.

    Matrices decay; vectors (norm weights, biases) do not. Ranks whose shard of a parameter is empty keep
    an empty state for it, so that checkpoints look the same on every rank.
    """

    def __init__(self, job: Job, weights: Weights):
        self.settings = job.optimizer
        self.weights = weights
        self.held = [i for i, master in enumerate(weights.masters) if master.numel() > 0]
        matrix = {i: weights.parameters[i].dim() >= 2 for i in self.held}
        groups = [
            {
                "params": [weights.masters[i] for i in self.held if matrix[i]],
                "weight_decay": self.settings.weight_decay,
            },
            {"params": [weights.masters[i] for i in self.held if not matrix[i]], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if self.settings.name == "adamw":
            self.torch: torch.optim.Optimizer = torch.optim.AdamW(
                groups, lr=self.settings.lr, betas=self.settings.betas, eps=self.settings.eps, fused=True
            )
        else:
            self.torch = torch.optim.SGD(
                groups, lr=self.settings.lr, momentum=self.settings.momentum, fused=True
            )
        self.ema: list[torch.Tensor] | None = None
        if self.settings.ema is not None:
            self.ema = [master.detach().clone() for master in weights.masters]

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`, then hand the new weights to the model."""
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()
        if self.ema is not None and self.settings.ema is not None:
            with torch.no_grad():
                move_each(self.ema, self.weights.masters, 1 - self.settings.ema)
        self.weights.publish()

    def state(self) -> dict[str, dict[str, Any]]:
        """By parameter name: its moments (and averaged weights), as distributed tensors where sharded.

        States are created where the optimizer has not made them yet, so that a checkpoint can be loaded
        before the first step.
        """
        found: dict[str, dict[str, Any]] = {}
        counter = self.torch.state[self.weights.masters[self.held[0]]].get("step")
        for index, (name, master) in enumerate(zip(self.weights.names, self.weights.masters, strict=True)):
            entry = self.torch.state[master]
            if self.settings.name == "adamw":
                if "step" not in entry:
                    entry["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                if counter is not None:
                    # An empty shard is never updated, but a checkpoint may keep its count for all ranks.
                    entry["step"].copy_(counter)
                kinds = ["exp_avg", "exp_avg_sq"]
            else:
                kinds = ["momentum_buffer"] if self.settings.momentum else []
            for kind in kinds:
                if entry.get(kind) is None:
                    entry[kind] = torch.zeros_like(master)
            found[name] = {
                kind: self.weights.whole_like(index, value) if kind in kinds else value
                for kind, value in entry.items()
                if value is not None
            }
            if self.ema is not None:
                found[name]["ema"] = self.weights.whole_like(index, self.ema[index])
        return found

    @torch.no_grad()
    def restart_average(self) -> None:
        """Let the average begin with the weights as they are now."""
        for average, master in zip(self.ema or [], self.weights.masters if self.ema else [], strict=True):
            average.copy_(master)

    def tensors_of(self, index: int) -> list[torch.Tensor]:
        """What is kept for one master: moments, counter, averaged weights."""
        entry = self.torch.state[self.weights.masters[index]]
        kept = [entry[kind] for kind in sorted(entry) if torch.is_tensor(entry[kind])]
        return kept + ([] if self.ema is None else [self.ema[index]])

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor this optimizer keeps on this rank: moments, counters, averaged weights."""
        kept = [
            value for entry in self.torch.state.values() for value in entry.values() if torch.is_tensor(value)
        ]
        return kept + (self.ema or [])
