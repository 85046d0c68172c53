"""AdamW and SGD as torch has them, fused."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fivefold.comm.compat import scale_each
from fivefold.config import Optimizer as Settings
from fivefold.training.updates.operations import Operands
from fivefold.training.updates.places import Places


class TorchUpdate:
    """AdamW or SGD with momentum. See `update.Update`.

    masters   all of this rank's
    matrices  of each, whether it decays: vectors (norm weights, biases) do not
    """

    publishes = False

    def __init__(
        self, settings: Settings, masters: Sequence[Tensor], matrices: Sequence[bool], indices: Sequence[int]
    ):
        self.settings, self.masters, self.indices = settings, masters, indices
        self.dtype = masters[0].dtype
        self.decays = [settings.weight_decay * matrix for matrix in matrices]
        self.counted = settings.name != "sgd"  # AdamW, which has the vectors under Muon too
        self.kinds: Sequence[str]
        held = [index for index in indices if masters[index].numel() > 0]
        groups = [
            {"params": [masters[i] for i in held if matrices[i]], "weight_decay": settings.weight_decay},
            {"params": [masters[i] for i in held if not matrices[i]], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.torch: torch.optim.Optimizer | None = None  # where all shards are empty
        if self.counted:
            self.kinds = ["exp_avg", "exp_avg_sq"]
            if groups:
                self.torch = torch.optim.AdamW(
                    groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
                )
        else:
            self.kinds = ["momentum_buffer"] if settings.momentum else []
            if groups:
                momentum = settings.momentum or 0.0
                self.torch = torch.optim.SGD(groups, lr=settings.lr, momentum=momentum, fused=True)
        self.kept: dict[Tensor, dict[str, Tensor]] = (
            defaultdict(dict) if self.torch is None else self.torch.state
        )
        self.held, self.first = held, (held or list(indices))[0]

    def step(self, lr: float, scale: Tensor | None = None) -> None:
        if self.torch is None:
            if self.counted:
                self.states(self.first)["step"] += 1
            return
        for index in self.held:
            self._widen(self.masters[index])
        if scale is not None:
            gradients = [self.masters[index].grad for index in self.held]
            scale_each([gradient for gradient in gradients if gradient is not None], scale)
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()

    def _widen(self, master: Tensor) -> None:
        """Torch's kernels want gradients in the dtype of what they update."""
        if master.grad is not None and master.grad.dtype != master.dtype:
            master.grad = master.grad.to(master.dtype)

    @property
    def places(self) -> dict[int, Places]:
        """Of each master as a whole of its own: where it lies in a larger one does not matter here."""
        return {index: Places(0, ((self.masters[index].numel(), 1),)) for index in self.held}

    def move(
        self, index: int, operands: Operands, places: Places, count: int, lr: float, scale: Tensor | None
    ) -> None:
        """The update number `count` of a piece of a master."""
        gradient, master, kept, copy = operands
        gradient = gradient.to(master.dtype)
        gradient = gradient if scale is None else gradient * scale
        settings = self.settings
        rest: dict[str, Any] = {
            "lr": lr,
            "weight_decay": self.decays[index],
            "maximize": False,
            "fused": True,
        }
        if self.counted:
            steps = torch.full((), count - 1, dtype=torch.float32, device=master.device)
            first, second = kept
            (beta1, beta2), eps = settings.betas, settings.eps
            numbers: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": eps, "amsgrad": False}
            adamw([master], [gradient], [first], [second], [], [steps], **numbers, **rest)
        else:
            momenta: list[Tensor | None] = [*kept] or [None]
            numbers = {"momentum": settings.momentum or 0.0, "dampening": 0.0, "nesterov": False}
            sgd([master], [gradient], momenta, **numbers, **rest)
        if copy is not None:
            copy.copy_(master)

    def states(self, index: int) -> dict[str, Tensor]:
        master = self.masters[index]
        kept = self.kept[master]
        if self.counted:
            counter = self.kept[self.masters[self.first]].get("step")
            if "step" not in kept:
                kept["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            if counter is not None:
                # An empty shard is never updated, but a checkpoint may keep its count for all ranks.
                kept["step"].copy_(counter)
        for kind in self.kinds:
            if kept.get(kind) is None:
                kept[kind] = torch.zeros_like(master)
        return {kind: value for kind, value in kept.items() if value is not None}

    def tensors_of(self, index: int) -> list[Tensor]:
        kept = self.kept[self.masters[index]]
        return [kept[kind] for kind in sorted(kept) if torch.is_tensor(kept[kind])]
