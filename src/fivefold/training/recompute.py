"""Activation recomputation: keep less from forward to backward, and compute it again.

    full        keep each layer's input only
    every-C     keep the input of every C-th layer; backward runs C layers forward again at a time
    sqrt        every-C with C the square root of the number of layers
    selective   keep the results of matrix products, attention and messages; recompute what is cheap between

Each segment is recomputed once. Applied before the model is compiled or split; the numbers do not change.
"""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fivefold.comm.compat import FUNCTIONAL_NAMESPACE, HEAVY_KERNELS
from fivefold.ledger.setup import segment_length
from fivefold.models.decoder import Decoder
from fivefold.operators import is_costly


def apply_recompute(model: Decoder, mode: str) -> None:
    """Make `model` recompute according to `mode`, in place."""
    if mode == "selective":
        for block in model.blocks.values():
            block.forward = partial(  # type: ignore[method-assign]
                checkpoint, block.forward, use_reentrant=False, context_fn=_selective_contexts
            )
        return
    length = segment_length(mode, len(model.blocks))
    if length is None:
        return

    def run_blocks(x: torch.Tensor, context: Any) -> torch.Tensor:
        blocks = list(model.blocks.values())
        for start in range(0, len(blocks), length):
            x = checkpoint(_run, model, blocks[start : start + length], x, context, use_reentrant=False)
        return x

    model.run_blocks = run_blocks  # type: ignore[method-assign]


def _run(model: Decoder, blocks: list[torch.nn.Module], x: torch.Tensor, context: Any) -> torch.Tensor:
    for block in blocks:
        x = model.run_block(block, x, context)
    return x


_EXPENSIVE = HEAVY_KERNELS | {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
}

_EXPENSIVE_NAMESPACES = {
    "torch_attn",  # the kernel for packed documents, registered when it is first imported
    FUNCTIONAL_NAMESPACE,  # what other ranks have sent: asking again would cost more than keeping it
}


def _keep_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _EXPENSIVE or operation.namespace in _EXPENSIVE_NAMESPACES or is_costly(operation):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_expensive)
