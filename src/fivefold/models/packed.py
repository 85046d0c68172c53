"""Attention over packed documents by a kernel that knows where they begin, instead of by a mask.

A mask costs S x S memory and makes the kernel look at every pair of tokens. The kernel here looks at pairs
within a document only. It exists on CUDA GPUs, for 16-bit numbers; elsewhere the mask does the same.
"""

from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

# Fewer key heads than query heads, from torch 2.13 on.
KERNEL_TAKES_GROUPS = TorchVersion(torch.__version__) >= "2.13"


def has_packed_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `packed_attention` works on such tensors."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def row_boundaries(rows: int, length: int, device: torch.device) -> Tensor:
    """The boundaries of a batch in which every row is one document, [rows + 1] int32."""
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, window: int | None
) -> Tensor:
    """Causal softmax attention inside each document.

    query       [B, H, S, D]; key, value [B, K, S, D] with K dividing H
    boundaries  [N + 1] int32: where each document begins in the batch read row by row, then B * S; a document
                never crosses rows, and the last entry may be repeated
    window      how many tokens a query sees, itself included; None is all before it
    returns     [B, H, S, D]
    """
    rows, heads, length, _ = query.shape
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if KERNEL_TAKES_GROUPS:
        options["enable_gqa"] = heads != key.shape[1]
    else:
        repeats = heads // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    tokens = (_flat(query), _flat(key), _flat(value))
    mixed: Tensor = _kernel()(*tokens, boundaries, boundaries, length, length, **options)
    return mixed.view(rows, length, *mixed.shape[1:]).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B * S, H, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _kernel() -> Any:
    from torch.nn.attention.varlen import varlen_attn  # takes seconds to import, and most runs need it not

    return varlen_attn
