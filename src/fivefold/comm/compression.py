"""Sums over ranks in 16 or 8 bits: half or a quarter of the bytes that float32 takes on the wire.

    bf16   every number rounded to bfloat16
    int8   every BLOCK neighbouring numbers share a scale, their largest magnitude over 127, and become
           integers of 8 bits

Each rank is sent the part of everyone's tensor that it is to add up (all-to-all), and adds in float32. That
is a reduce-scatter. For an all-reduce it sends the sums to all (all-gather): a number is rounded twice,
however many ranks there are, and all ranks end up with the same bits. One number that is not finite makes
its whole block NaN.

Error feedback: what rounding left out of a message is kept on the rank that sent it, and added to the next
one. So nothing is lost, only late: what ranks have applied after many steps differs from the true sum by the
last step's rounding, not by that of all steps.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.compat import functional
from fivefold.comm.payloads import BLOCK, SCALE, part_length

LARGEST = 127
UPWARD = 1 + 2**-8
"""So that a scale is not rounded to less than it was, and no number becomes larger than LARGEST."""


def packed(x: Tensor, kind: str) -> Tensor:
    """[..., n] of floats -> [..., packed_bytes(n, kind)] of bytes; in 8 bits numbers, then scales."""
    if kind == "bf16":
        return x.bfloat16().contiguous().view(torch.uint8)
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True).float() / LARGEST * UPWARD).bfloat16()
    numbers = (blocks / scales.float().where(scales > 0, 1.0)).round().to(torch.int8)
    parts = numbers.flatten(-2), scales.where(scales.isfinite(), torch.nan).flatten(-2)
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def unpacked(x: Tensor, kind: str, n: int) -> Tensor:
    """The inverse of `packed`, in float32: [..., packed_bytes(n, kind)] of bytes -> [..., n]."""
    if kind == "bf16":
        return x.view(torch.bfloat16).float()
    blocks = x.shape[-1] // (BLOCK + SCALE)
    numbers, scales = x.split([blocks * BLOCK, blocks * SCALE], -1)
    wide = numbers.view(torch.int8).unflatten(-1, (blocks, BLOCK)).float()
    result: Tensor = (wide * scales.contiguous().view(torch.bfloat16).float()[..., None]).flatten(-2)[..., :n]
    return result


class Residual:
    """What rounding has left out of one rank's part in a sum of `size` numbers, which is done every step.

    value  [size] of bfloat16: it is small beside the numbers, so that 8 bits of it are enough
    """

    def __init__(self, size: int, device: torch.device):
        self.value = torch.zeros(size, dtype=torch.bfloat16, device=device)

    def keep(self, wanted: Tensor, sent: Tensor) -> None:
        """Of a whole tensor [size or more: padding behind it] this was wanted, and that was sent."""
        self.value.copy_((wanted - sent).flatten()[: self.value.numel()])

    def add(self, start: int, wanted: Tensor, sent: Tensor) -> None:
        """Of the numbers from `start` on, what was wanted and what was sent on top."""
        mine = self.value[start : start + wanted.numel()]
        mine += (wanted - sent)[: mine.numel()]

    def forget(self) -> None:
        self.value.zero_()


class PartsOnTheirWay:
    """Every rank's `x`, `length` numbers of it on their way to each rank of `group`; `added` adds up mine."""

    def __init__(
        self, x: Tensor, length: int, group: dist.ProcessGroup, kind: str, residual: Residual | None
    ):
        ranks, self.kind, self.length = group.size(), kind, length
        if residual is not None:
            x = x + residual.value
        rows = torch.nn.functional.pad(x, (0, ranks * self.length - x.numel())).view(ranks, self.length)
        sent = packed(rows, kind)
        if residual is not None:
            residual.keep(rows, unpacked(sent, kind, self.length))
        each = [1] * ranks
        self._flight = functional.all_to_all_single(sent, each, each, group.group_name)

    def added(self) -> Tensor:
        """The sum of all ranks' parts, [length] in float32."""
        parts = functional.wait_tensor(self._flight)
        return unpacked(parts, self.kind, self.length).sum(0)


class CompressedSum:
    """The sum of every rank's `x` [n] over `group`, on its way: `add` once, then `result`, on all ranks."""

    def __init__(
        self, x: Tensor, group: dist.ProcessGroup, kind: str = "int8", residual: Residual | None = None
    ):
        self.size, self.dtype, self.group = x.numel(), x.dtype, group
        self.kind, self.residual = kind, residual
        length = part_length(self.size, group.size(), kind)
        self._parts = PartsOnTheirWay(x, length, group, kind, residual)

    def add(self) -> None:
        """When everyone's part is here: add up, and send the sums on."""
        total, length = self._parts.added(), self._parts.length
        mine = packed(total, self.kind)
        if self.residual is not None:  # the next sum makes up for it, if one rank sends it
            self.residual.add(self.group.rank() * length, total, unpacked(mine, self.kind, length))
        self._flight = functional.all_gather_into_tensor(mine[None], self.group.size(), self.group.group_name)

    def result(self) -> Tensor:
        """The sum, [n] of the dtype that was given."""
        whole = functional.wait_tensor(self._flight)
        found = unpacked(whole, self.kind, self._parts.length)
        return found.flatten()[: self.size].to(self.dtype, copy=True)  # the padding goes


def reduce_scattered(x: Tensor, group: dist.ProcessGroup, kind: str, residual: Residual | None) -> Tensor:
    """This rank's part, [n / ranks] in float32, of the sum of every rank's `x` [n]."""
    return PartsOnTheirWay(x, x.numel() // group.size(), group, kind, residual).added()
