"""The feed-forward layer: widen, bend, narrow."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models.spec import ModelSpec


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": _gelu_tanh,
    "relu": F.relu,
    "swiglu": F.silu,
    "geglu-tanh": _gelu_tanh,
}
"""The function of each; with a gate matrix it is applied to the gate alone, which then multiplies `up`."""


class Mlp(nn.Module):
    def __init__(self, spec: ModelSpec, ffn: int | None = None):
        """`ffn` is the hidden width, by default the spec's."""
        super().__init__()
        ffn = ffn or spec.ffn
        self.activate = ACTIVATIONS[spec.activation]
        self.gate = nn.Linear(spec.dim, ffn, bias=spec.mlp_bias) if spec.gated else None
        self.up = nn.Linear(spec.dim, ffn, bias=spec.mlp_bias)
        self.down = nn.Linear(ffn, spec.dim, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        if self.gate is not None:
            hidden = self.activate(self.gate(x)) * self.up(x)
        else:
            hidden = self.activate(self.up(x))
        projected: Tensor = self.down(hidden)
        return projected
