"""AdamW of `operations.py` as a kernel of a GPU: one for each parameter, over its runs in blocks.

It computes the same bits as the operations of torch there: nothing is fused that would round once instead of
twice, and quotient and root are rounded to the nearest. Moments in bfloat16 come as int16, for their bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.training.updates import operations, stochastic
from fivefold.training.updates.operations import Numbers, Operands
from fivefold.training.updates.places import Places

BLOCK = 1024
RUNS = 3
"""How many runs within each other the kernel knows: blocks of stacks of matrices."""

_FIRST, _SECOND = tl.constexpr(stochastic.FIRST), tl.constexpr(stochastic.SECOND)
_EXPONENT, _QUIET = tl.constexpr(stochastic.EXPONENT), tl.constexpr(stochastic.QUIET)


def adamw(
    operands: Operands, numbers: Numbers, scale: Tensor | None, places: Places, key: stochastic.Key
) -> None:
    """As `operations.adamw`, which it calls for a part that lies too scattered in the whole."""
    gradient, master, moments, copy = operands
    if len(places.runs) > RUNS:
        return operations.adamw(operands, numbers, scale, places, key)
    if not all(each.is_contiguous() for each in (master, *moments, copy) if each is not None):
        raise ValueError("the kernel walks through tensors in one run")
    if scale is None:
        scale = torch.ones((), dtype=torch.float32, device=master.device)
    rounds = moments[0].dtype == torch.bfloat16
    first, second = (moment.view(torch.int16) if rounds else moment for moment in moments)
    (outer, outer_apart), (middle, middle_apart), (inner, _) = (
        *[(1, 0)] * (RUNS - len(places.runs)),
        *places.runs,
    )
    grid = (outer * middle * triton.cdiv(inner, BLOCK),)
    _adamw[grid](
        gradient.contiguous(),
        master,
        first,
        second,
        master if copy is None else copy,
        scale,
        inner,
        middle,
        places.first,
        outer_apart,
        middle_apart,
        *key,
        *numbers,
        ROUNDS=rounds,
        COPIES=copy is not None,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


@triton.jit
def _mixed(words):
    words = (words ^ (words >> 16)) * _FIRST
    words = (words ^ (words >> 15)) * _SECOND
    return words ^ (words >> 16)


@triton.jit
def _widened(stored):
    """bfloat16, as the int16 of the same bits, in float32."""
    return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(values, chance):
    """float32 as bfloat16, as the int16 of the same bits: see `stochastic.rounded`."""
    bits = values.to(tl.uint32, bitcast=True)
    up = bits + chance
    finite = (bits & _EXPONENT) != _EXPONENT
    stays = ((up & _EXPONENT) == _EXPONENT) | (finite == 0)
    up = tl.where(stays, bits, up)
    up = tl.where(values != values, up | _QUIET, up)
    return (up >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def moved(g, w, m, v, keep, share, keep_square, share_square, root, eps, size):
    """The new weight and moments: see `operations.py`."""
    m = m + share * (g - m)
    v = v * keep_square + share_square * g * g
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    return w * keep - tl.div_rn(size * m, denominator), m, v


@triton.jit(do_not_specialize=["first_place", "key_0", "key_1"])
def _adamw(
    gradient,
    master,
    moment,
    square,
    copy,
    scale,
    inner,
    middle,
    first_place,
    outer_apart,
    middle_apart,
    key_0,
    key_1,
    keep,
    share,
    keep_square,
    share_square,
    root,
    eps,
    size,
    ROUNDS: tl.constexpr,  # noqa: N803
    COPIES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(inner, BLOCK)
    row = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    there = column < inner
    here = row * inner + column

    g = tl.load(gradient + here, mask=there, other=0).to(tl.float32) * tl.load(scale)
    w = tl.load(master + here, mask=there, other=0)
    m = tl.load(moment + here, mask=there, other=0)
    v = tl.load(square + here, mask=there, other=0)
    if ROUNDS:
        m, v = _widened(m), _widened(v)
    w, m, v = moved(g, w, m, v, keep, share, keep_square, share_square, root, eps, size)
    tl.store(master + here, w, mask=there)
    if COPIES:
        tl.store(copy + here, w.to(copy.dtype.element_ty), mask=there)
    if ROUNDS:
        index = first_place + (row // middle) * outer_apart + (row % middle) * middle_apart + column
        low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
        words = _mixed(_mixed(low ^ key_0.to(tl.uint32)) ^ high ^ key_1.to(tl.uint32))
        tl.store(moment + here, _rounded(m, words & 0xFFFF), mask=there)
        tl.store(square + here, _rounded(v, words >> 16), mask=there)
    else:
        tl.store(moment + here, m, mask=there)
        tl.store(square + here, v, mask=there)
