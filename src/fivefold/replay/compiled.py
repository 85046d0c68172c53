"""What compiling a part (`training.compile`) changes in its activations on a GPU.

A compiler keeps what goes into matrix products and attention and what comes out of them, as the eager program
does, and computes what lies between again; what lives inside a fused kernel is never in memory. Seen in saved
tensors and peaks of compiled parts on an H200 (torch 2.11, bfloat16):

    block  The result of SiLU is not kept. Backward reuses the memory of what was saved: beyond it, it needs
           one tensor as wide as the feed-forward layer and the gradient of one of its matrices.
    head   Logits stay in the compute dtype and have no copies, and their gradient takes their place: beyond
           them backward needs the gradient of the output matrix. Where rows of logits are not aligned to 16
           bytes (gpt2's vocabulary), that gradient is copied into aligned rows, once for each product.
           A loss in chunks keeps what it keeps eagerly: gradients. Its wide logits are inside of kernels. (By
           its code, not yet seen on a GPU.)

Left as they run eagerly: blocks that are recomputed, experts (which are not compiled), heads split over tp.
"""

from dataclasses import astuple, replace

import numpy as np

from fivefold.axes.pieces import Part
from fivefold.ledger.setup import Figure, Setup
from fivefold.replay.activations import Activations
from fivefold.replay.operations import WIDE

ALIGNED = 16
IN_FUSED_FORWARD = {"block": 3, "head": 2}
"""Tensors of the residual stream's size that are there at a part's fullest moment beside what it keeps."""
IN_FUSED_CHUNK = 2
"""Of a chunk of the loss: its logits and their gradient, in the compute dtype."""


def compiled(part: Part, eager: Activations, setup: Setup) -> Activations:
    """A part of the model, given what it keeps when it is run eagerly."""
    if part == "block" and setup.recompute == "none" and setup.spec.experts is None:
        return _block(eager, setup)
    return _head(eager, setup) if part == "head" else eager


def _block(eager: Activations, setup: Setup) -> Activations:
    spec, width = setup.spec, setup.precision.compute_bytes
    stream = setup.tokens // setup.stream_split * spec.dim * width
    ffn = setup.tokens * spec.ffn // setup.tp * width
    matrix = spec.dim * spec.ffn // setup.tp * width
    saved = eager.saved - (ffn if spec.gated else 0)
    if spec.norm_unit_offset:  # run eagerly, such norms keep their inputs in float32
        norms = (1 if spec.parallel_block else 2) + 2 * spec.norm_after
        saved = saved - norms * (max(WIDE, width) // width - 1) * stream
    forward = saved + IN_FUSED_FORWARD["block"] * stream
    return _changed(eager, saved, forward, np.minimum(eager.backward_peak, ffn + matrix))


def _head(eager: Activations, setup: Setup) -> Activations:
    fused = _chunked(eager, setup) if setup.loss_chunk else _whole(eager, setup)
    figures = zip(astuple(fused), astuple(eager), strict=True)
    return Activations(*(np.where(np.equal(setup.tp, 1), *both) for both in figures))


def _chunked(eager: Activations, setup: Setup) -> Activations:
    """What is kept is the same, and so is backward, which has no logits."""
    spec, width = setup.spec, setup.precision.compute_bytes
    logits = np.minimum(setup.tokens, setup.loss_chunk) * spec.vocab_size * width
    forward = eager.saved + setup.tokens * spec.dim * width + IN_FUSED_CHUNK * logits
    return replace(eager, forward_peak=np.minimum(eager.forward_peak, forward))


def _whole(eager: Activations, setup: Setup) -> Activations:
    spec, width, logits = setup.spec, setup.precision.compute_bytes, setup.tokens * setup.spec.vocab_size
    copies = max(WIDE, width) - width + width * (spec.final_softcap is not None)
    saved = eager.saved - logits * copies
    forward = saved + IN_FUSED_FORWARD["head"] * setup.tokens * spec.dim * width
    aligned = spec.vocab_size * width % ALIGNED == 0
    backward = spec.dim * spec.vocab_size * width if aligned else 2 * logits * width
    return _changed(eager, saved, forward, backward)


def _changed(eager: Activations, saved: Figure, forward: Figure, backward: Figure) -> Activations:
    held = backward + eager.with_gradients - eager.backward_peak
    return replace(eager, saved=saved, forward_peak=forward, backward_peak=backward, with_gradients=held)
