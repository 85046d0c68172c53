"""Sums over ranks in 8 bits: a quarter of the bytes that float32 takes on the wire.

Every BLOCK neighbouring numbers share a scale, their largest magnitude over 127, and become integers of 8
bits. A sum takes two messages. Each rank is sent the part of everyone's tensor that it is to add up
(all-to-all), adds in float32, and sends the sums to all (all-gather). So a number is rounded twice, however
many ranks there are, and all ranks end up with the same bits. One number that is not finite makes its whole
block NaN.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.compat import functional
from fivefold.comm.payloads import BLOCK, SCALE, compressed_bytes

LARGEST = 127


def packed(x: Tensor) -> Tensor:
    """[..., n] of floats, n a multiple of BLOCK -> [..., n + 4 n / BLOCK] of bytes: numbers, then scales."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True).float() / LARGEST
    numbers = (blocks / scales.where(scales > 0, 1.0)).round().to(torch.int8)
    parts = numbers.flatten(-2), scales.flatten(-2)
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def unpacked(x: Tensor) -> Tensor:
    """The inverse of `packed`, in float32: [..., n + 4 n / BLOCK] of bytes -> [..., n]."""
    blocks = x.shape[-1] // (BLOCK + SCALE)
    numbers, scales = x.split([blocks * BLOCK, blocks * SCALE], -1)
    wide = numbers.view(torch.int8).unflatten(-1, (blocks, BLOCK)).float()
    result: Tensor = (wide * scales.contiguous().view(torch.float32)[..., None]).flatten(-2)
    return result


class CompressedSum:
    """The sum of every rank's `x` [n] over `group`, on its way: `add` once, then `result`, on all ranks."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup):
        self.size, self.dtype, self.group = x.numel(), x.dtype, group
        ranks = group.size()
        padded = compressed_bytes(self.size, ranks) // (BLOCK + SCALE) * BLOCK
        rows = packed(torch.nn.functional.pad(x, (0, padded - self.size)).view(ranks, -1))
        each = [1] * ranks
        self._flight = functional.all_to_all_single(rows, each, each, group.group_name)

    def add(self) -> None:
        """When everyone's part is here: add up, and send the sums on."""
        parts = functional.wait_tensor(self._flight)
        mine = packed(unpacked(parts).sum(0))
        name = self.group.group_name
        self._flight = functional.all_gather_into_tensor(mine[None], self.group.size(), name)

    def result(self) -> Tensor:
        """The sum, [n] of the dtype that was given."""
        whole = functional.wait_tensor(self._flight)
        return unpacked(whole).flatten()[: self.size].to(self.dtype, copy=True)  # the padding goes
