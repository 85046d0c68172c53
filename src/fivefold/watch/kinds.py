"""What a recorded kernel or operator is for: kinds of work, and the names by which each is known. No torch.

Names change with every version of a library: a new one is a word more in a table below.
"""

from __future__ import annotations

import re
from functools import cache

KINDS = {
    "products": "products",
    "attention": "attention",
    "loss": "softmax, loss",
    "norms": "norms, elementwise",
    "optimizer": "optimizer",
    "copies": "copies",
    "other": "other",
    "messages": "messages",
    "idle": "idle",
}
"""Kind -> how it is told. Where several run at once, the time counts as the first one's."""

KERNELS = (
    ("messages", r"nccl|rccl|msccl|nvshmem|deep_ep|all_reduce_kernel|cross_device_reduce"),
    ("optimizer", r"Fused(Adam|Sgd)|LpNorm|^_(adamw|squares)$"),
    # A compiler names what it fuses by all operators that had a part in it.
    ("loss", r"nll_loss|log_softmax|cunn_SoftMax|cross_entropy"),
    ("norms", r"^triton_(poi|red|per|for)_"),
    ("attention", r"flash|fmha|sdpa|attention|_attn_"),
    ("products", r"gemm|gemv|nvjet|xmma|cublas|splitKreduce|^Cijk_|(^|_)(mm|bmm|addmm)(_|$)|matmul"),
    ("copies", r"chunk_cat|split_with_sizes_copy"),
    (
        "norms",
        r"elementwise|multi_tensor_apply|reduce_kernel|(layer|rms|group)_?norm|GammaBeta|RowwiseMoments|softmax"
        r"|silu|gelu|rotary|CatArray|index|gather|scatter|embedding|topk|sort|scan|histogram|cub::",
    ),
)
"""Kernels of a GPU, the first that is found: NCCL, torch, Triton, FlashAttention, cuDNN, cuBLAS, CUTLASS."""

OPERATORS = (
    ("messages", r"^(gloo:|c10d::|_c10d_functional::)"),
    # Around other operators: autograd's functions and ours. What they do themselves is the host's work.
    # But compiled code ("## Call CompiledFxGraph ... ##") has kernels of its own in it.
    ("idle", r"^[^:#]*$|^autograd::|^torch::autograd::|^fivefold::"),
    ("copies", r"^fsdp::|^aten::(_chunk_cat|split_with_sizes_copy)"),
    ("optimizer", r"^aten::_fused_(adam|adamw|sgd)_"),
    (
        "products",
        r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|mv|addmv|dot|_?grouped_mm|_?scaled_mm)(_out)?$|^mkl",
    ),
    ("loss", r"^aten::(_?log_softmax|nll_loss|cross_entropy)"),
    ("norms", r"^aten::"),
)
"""Operators as torch calls them, the first that is found."""

WHOLE = (
    (
        "attention",
        r"^(?!autograd::).*(scaled_?dot_?product|_(flash|efficient|cudnn)_attention|(ring|capped)_attention)",
    ),
    ("loss", r"^(?!autograd::).*SummedCrossEntropy"),
)
"""Operators that are of one kind with all that runs inside them, messages apart."""

OPTIMIZER_PHASES = ("loss and norm", "optimizer", "outer step")
"""Phases of a step whose work is the optimizer's, whatever it is: norm, clipping, update."""


def _first(table: tuple[tuple[str, str], ...], name: str) -> str | None:
    return next((kind for kind, pattern in table if re.search(pattern, name, re.IGNORECASE)), None)


@cache
def kernel_kind(name: str) -> str | None:
    """The kind of a GPU's kernel by its name; None where it is not known."""
    return _first(KERNELS, name)


@cache
def operator_kind(name: str) -> str | None:
    """The kind of an operator that torch calls; None where it is not known."""
    return _first(OPERATORS, name)


@cache
def whole_kind(name: str) -> str | None:
    """The kind of all that runs inside an operator; None of most."""
    return _first(WHOLE, name)


def in_phase(kind: str, phase: str | None) -> str:
    """The kind of something that was started in a phase of the step."""
    return "optimizer" if phase in OPTIMIZER_PHASES and kind not in ("messages", "copies", "idle") else kind
