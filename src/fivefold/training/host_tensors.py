"""Tensors in the host's memory that a GPU reads and writes by itself, at the full rate of its link.

For that the driver locks their pages. Torch's own locked memory comes in powers of two, which may waste half
of it: these take what they need.
"""

import mmap
import sys
from typing import Any

import torch
from torch import Tensor


def on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy in host memory, row-major; locked for `device` where that is a GPU."""
    copied = zeros_on_host(tensor.shape, tensor.dtype, device)
    return copied.copy_(tensor.detach())


def zeros_on_host(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, locked for `device` where that is a GPU."""
    size = shape.numel() * dtype.itemsize
    if device.type != "cuda" or not size or not torch.cuda.is_available():
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(_Locked(size), dtype=dtype, count=shape.numel()).view(shape)


class _Locked(mmap.mmap):
    """Pages of zeros of this process alone, locked until nobody uses them any more."""

    address: int
    driver: Any

    def __new__(cls, size: int) -> "_Locked":
        pages = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        driver = torch.cuda.cudart()
        try:
            torch.cuda.check_error(driver.cudaHostRegister(address, size, 0))
        except RuntimeError as error:
            told = f"{size / 2**30:.2f} GiB of host memory cannot be locked for optimizer.offload: {error}"
            raise RuntimeError(told) from error
        pages.address, pages.driver = address, driver
        return pages

    def __del__(self) -> None:
        if hasattr(self, "driver") and not sys.is_finalizing():  # the system has it back anyway
            self.driver.cudaHostUnregister(self.address)
