"""What compiling a part (`training.compile`) changes in its activations on a GPU.

A compiler keeps what goes into matrix products and attention and what comes out of them, as the eager program
does, and computes what lies between again; what lives inside a fused kernel is never in memory. Seen in saved
tensors and peaks of compiled parts on an H200 (torch 2.11, bfloat16):

    block  The result of SiLU is not kept. Backward reuses the memory of what was saved: beyond it, it needs
           one tensor as wide as the feed-forward layer and the gradient of one of its matrices.
    head   Logits stay in the compute dtype and have no copies, and their gradient takes their place: beyond
           them backward needs the gradient of the output matrix. Where rows of logits are not aligned to 16
           bytes (gpt2's vocabulary), that gradient is copied into aligned rows, once for each product.

Left as they run eagerly: blocks that are recomputed, experts (which are not compiled), heads split over tp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fivefold.ledger.setup import Setup
from fivefold.replay.operations import WIDE

if TYPE_CHECKING:
    from fivefold.replay.activations import Activations

ALIGNED = 16
IN_FUSED_FORWARD = {"block": 3, "head": 2}
"""Tensors of the residual stream's size that are there at a part's fullest moment beside what it keeps."""


def compiled_block(eager: Activations, setup: Setup) -> Activations:
    """One block, given what it keeps when it is run eagerly."""
    if setup.recompute != "none" or setup.spec.experts is not None:
        return eager
    width = setup.precision.compute_bytes
    stream = setup.tokens // (setup.tp if setup.sequence_parallel else 1) * setup.spec.dim * width
    ffn = setup.tokens * setup.spec.ffn // setup.tp * width
    matrix = setup.spec.dim * setup.spec.ffn // setup.tp * width
    saved = eager.saved - (ffn if setup.spec.gated else 0)
    backward = np.minimum(eager.backward_peak, ffn + matrix)
    forward = saved + IN_FUSED_FORWARD["block"] * stream
    held = backward + eager.with_gradients - eager.backward_peak
    return replace(eager, saved=saved, forward_peak=forward, backward_peak=backward, with_gradients=held)


def compiled_head(eager: Activations, setup: Setup) -> Activations:
    """The head and the loss; of layouts that split it over tp, as it runs eagerly."""
    width, logits = setup.precision.compute_bytes, setup.tokens * setup.spec.vocab_size
    saved = eager.saved - logits * (max(WIDE, width) - width)
    aligned = setup.spec.vocab_size * width % ALIGNED == 0
    matrix = setup.spec.dim * setup.spec.vocab_size * width
    backward = 0 * saved + matrix if aligned else 2 * logits * width
    forward = saved + IN_FUSED_FORWARD["head"] * setup.tokens * setup.spec.dim * width
    held = backward + eager.with_gradients - eager.backward_peak
    alone = np.asarray(setup.tp) == 1
    return replace(
        eager,
        saved=np.where(alone, saved, eager.saved),
        forward_peak=np.where(alone, forward, eager.forward_peak),
        backward_peak=np.where(alone, backward, eager.backward_peak),
        with_gradients=np.where(alone, held, eager.with_gradients),
    )
