"""The updates of `operations.py` as kernels of a GPU: one for each parameter, over its runs in blocks.

They compute the same bits as the operations of torch there: nothing is fused that would round once instead of
twice, and quotient and root are rounded to the nearest. Moments in bfloat16 come as int16, for their bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.training.updates import moments as kept
from fivefold.training.updates import operations, stochastic
from fivefold.training.updates.operations import Numbers, Operands
from fivefold.training.updates.places import Places
from fivefold.training.updates.rounding_kernels import decoded, encoded, random_words, rounded, widened

BLOCK = 1024
RUNS = 3
"""How many runs within each other the kernel knows: blocks of stacks of matrices."""


def adamw(
    operands: Operands, numbers: Numbers, scale: Tensor | None, places: Places, key: stochastic.Key
) -> None:
    """As `operations.adamw`, which it calls for a part that lies too scattered in the whole."""
    gradient, master, moments, copy = operands
    if len(places.runs) > RUNS:
        return operations.adamw(operands, numbers, scale, places, key)
    _refuse_gaps(master, *moments, *([] if copy is None else [copy]))
    dtype = moments[0].dtype
    rounds = dtype == torch.bfloat16
    first, second = (moment.view(torch.int16) if rounds else moment for moment in moments)
    grid, where = _runs(places)
    _adamw[grid](
        gradient.contiguous(),
        master,
        first,
        second,
        master if copy is None else copy,
        _ones(master) if scale is None else scale,
        *where,
        *key,
        *numbers,
        ROUNDS=rounds,
        CODES=dtype == kept.CODES,
        COPIES=copy is not None,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


def momentum(
    gradient: Tensor, buffer: Tensor, mu: float, scale: Tensor | None, places: Places, key: stochastic.Key
) -> None:
    """As `operations.momentum`, which it calls for a part that lies too scattered in the whole."""
    if len(places.runs) > RUNS:
        return operations.momentum(gradient, buffer, mu, scale, places, key)
    _refuse_gaps(gradient, buffer)
    grid, where = _runs(places)
    _momentum[grid](
        gradient,
        buffer.view(torch.int16),
        _ones(gradient) if scale is None else scale,
        *where,
        *key,
        mu,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


def _refuse_gaps(*tensors: Tensor) -> None:
    if not all(each.is_contiguous() for each in tensors):
        raise ValueError("the kernel walks through tensors in one run")


def _ones(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=like.device)


def _runs(places: Places) -> tuple[tuple[int], tuple[int, ...]]:
    """How many blocks there are, and what `_placed` finds elements by."""
    (outer, outer_apart), (middle, middle_apart), (inner, _) = (
        *[(1, 0)] * (RUNS - len(places.runs)),
        *places.runs,
    )
    blocks = outer * middle * triton.cdiv(inner, BLOCK)
    return (blocks,), (inner, middle, places.first, outer_apart, middle_apart)


@triton.jit
def _placed(inner, middle, first_place, outer_apart, middle_apart, BLOCK: tl.constexpr):  # noqa: N803
    """Of this program's elements: where they lie here, which of them are there, and their global index."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(inner, BLOCK)
    row = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    index = first_place + (row // middle) * outer_apart + (row % middle) * middle_apart + column
    return row * inner + column, column < inner, index


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
    CODES: tl.constexpr,  # noqa: N803
    COPIES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    here, there, index = _placed(inner, middle, first_place, outer_apart, middle_apart, BLOCK)
    g = tl.load(gradient + here, mask=there, other=0).to(tl.float32) * tl.load(scale)
    w = tl.load(master + here, mask=there, other=0)
    m = tl.load(moment + here, mask=there, other=0)
    v = tl.load(square + here, mask=there, other=0)
    if ROUNDS:
        m, v = widened(m), widened(v)
    if CODES:
        m, v = decoded(m, v)
    w, m, v = moved(g, w, m, v, keep, share, keep_square, share_square, root, eps, size)
    tl.store(master + here, w, mask=there)
    if COPIES:
        tl.store(copy + here, w.to(copy.dtype.element_ty), mask=there)
    if ROUNDS:
        words = random_words(index, key_0, key_1)
        tl.store(moment + here, rounded(m, words & 0xFFFF), mask=there)
        tl.store(square + here, rounded(v, words >> 16), mask=there)
    elif CODES:
        words = random_words(index, key_0, key_1)
        ratios, squares = encoded(m, v, words)
        tl.store(moment + here, ratios, mask=there)
        tl.store(square + here, squares, mask=there)
    else:
        tl.store(moment + here, m, mask=there)
        tl.store(square + here, v, mask=there)


@triton.jit(do_not_specialize=["first_place", "key_0", "key_1"])
def _momentum(
    gradient,
    buffer,
    scale,
    inner,
    middle,
    first_place,
    outer_apart,
    middle_apart,
    key_0,
    key_1,
    mu,
    BLOCK: tl.constexpr,  # noqa: N803
):
    here, there, index = _placed(inner, middle, first_place, outer_apart, middle_apart, BLOCK)
    g = tl.load(gradient + here, mask=there, other=0).to(tl.float32) * tl.load(scale)
    m = mu * widened(tl.load(buffer + here, mask=there, other=0)) + g
    tl.store(gradient + here, (g + mu * m).to(gradient.dtype.element_ty), mask=there)
    words = random_words(index, key_0, key_1)
    tl.store(buffer + here, rounded(m, words & 0xFFFF), mask=there)
