"""How long one operation takes on one device: matrix products by their shape, attention, and moving bytes.

A matrix product is cut into tiles, one for each multiprocessor at a time. It is slower than the peak where
the tiles do not fill the last round ("wave quantisation"), where small tiles are needed to have enough of
them, where the inner dimension is too short to pay for a tile's beginning and end, and where rows are not
aligned to the 128 bytes that memory and tensor cores take at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from fivefold.hardware.cluster import TALL, Cluster, Measured
from fivefold.hardware.devices import Device
from fivefold.ledger.setup import Figure
from fivefold.ledger.work import Work
from fivefold.planner.time.stack import Constants, Stack

TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.5))
"""Rows, columns, and a tile's rate relative to the largest one's: a smaller one reads more for its work."""
TILE_ENDS = 96
"""A tile's beginning and end cost as much as this many steps along the inner dimension."""
ALIGNED = 64
"""Elements of 16 bits in 128 bytes."""
MISALIGNED = 0.75
"""The rate of products with a dimension that is not aligned. BLOOM's engineers measured 94 TFLOP/s with a
hidden size of 14,400 and 120 with 13,824 (BigScience, chronicles of tr11-176B)."""
BANDWIDTH = 0.85
"""Part of the memory's bandwidth that streaming kernels reach."""
SMS = 108
"""Multiprocessors of a device whose number is not known."""

FLASH = {
    "flash-1": ((0.42, 0.38), (0.25, 0.22), (0.2, 0.18)),
    "flash-2": ((0.60, 0.52), (0.35, 0.30), (0.3, 0.26)),
    "flash-3": ((0.62, 0.54), (0.60, 0.50), (0.6, 0.50)),
}
"""Attention kernel -> part of the peak, forward and backward, that long sequences reach on an A100, an H100
and a B200: the faster the tensor cores, the less of them older kernels use. Dao 2023 (arXiv 2307.08691)
figures 4 to 7, and Shah et al. 2024 (arXiv 2407.08608) figures 5 and 6; of the B200 an assumption."""
GENERATIONS = (500e12, 1600e12)
"""FLOP/s in 16 bits from which on a device is more like an H100 than an A100, and a B200 than an H100."""
FLASH_RAMP = 512
"""A sequence of this many tokens reaches half of the rate of a long one."""

SCORE_BYTES = {"forward": 14.0, "backward": 24.0}
"""Moved for each score by unfused attention in 16 bits: product, mask and softmax, dropout, product."""


def peak(device: Device, dtype: str) -> float:
    """FLOP/s in a dtype, or in the next wider one that the device is known for."""
    for name in (dtype, *{"float4": ("float8", "bfloat16")}.get(dtype, ("bfloat16",)), "float16", "float32"):
        if name in device.peak_flops:
            rate = device.peak_flops[name]
            return 2 * rate if dtype == "float4" and name == "float8" else rate
    return 1e11


def matmul_time(work: Work, device: Device, dtype: str, fraction: float) -> Figure:
    """Seconds of one matrix product."""
    sms = device.sms or SMS
    rate = peak(device, dtype) * fraction
    rows, inner, columns, batch = (
        np.asarray(n, dtype=float) for n in (work.rows, work.inner, work.columns, work.batch)
    )
    best: Figure = np.inf
    for high, wide, relative in TILES:
        tiles = np.ceil(rows / high) * np.ceil(columns / wide) * batch
        waves = np.ceil(tiles / sms)
        best = np.minimum(best, waves * sms * high * wide / relative)
    seconds: Figure = 2.0 * best * (inner + TILE_ENDS) / rate
    # Few tiles with much to sum: the inner dimension is cut too.
    seconds = np.minimum(seconds, 2.0 * batch * rows * columns * inner / (0.75 * rate) + 5e-6)
    misaligned = (inner % ALIGNED != 0) | (columns % ALIGNED != 0)
    seconds = np.where(misaligned, seconds / MISALIGNED, seconds)
    return np.maximum(seconds, work.moved / (device.memory_bandwidth * BANDWIDTH))


def attention_time(work: Work, device: Device, dtype: str, kernel: str, constants: Constants) -> Figure:
    """Seconds of one attention, forward or backward."""
    backward = work.phase != "forward"
    if kernel == "unfused":
        return _unfused_time(work, device, dtype, backward, constants.matmul)
    generation = bisect_right(GENERATIONS, peak(device, "bfloat16"))
    reached = FLASH[kernel][generation][int(backward)] * constants.attention
    head: Figure = np.minimum(1.0, 0.7 + 0.3 * work.inner / 128.0)
    ramp = work.columns / (work.columns + FLASH_RAMP)
    return work.flops * work.causal / (peak(device, dtype) * reached * head * ramp)


def _unfused_time(work: Work, device: Device, dtype: str, backward: bool, fraction: float) -> Figure:
    """Scores are written out: two products of batches of small matrices, and softmax over what they make."""
    scores = 1.0 * work.batch * work.rows * work.columns
    moved = scores * SCORE_BYTES["backward" if backward else "forward"]
    # Scores are kept: four products, not flash attention's five.
    flops = work.flops * (0.8 if backward else 1.0)
    # Products with a head's width as a side use the tensor cores badly.
    width: Figure = np.minimum(1.0, work.inner / 128.0)
    products = flops / (peak(device, dtype) * fraction * 0.7 * width)
    return products + moved / (device.memory_bandwidth * BANDWIDTH)


def memory_time(moved: Figure, cluster: Cluster) -> Figure:
    """Seconds to read and write some bytes."""
    if cluster.measured is not None:
        return moved / cluster.measured.memory_bandwidth
    return moved / (cluster.device.memory_bandwidth * BANDWIDTH)


def work_time(work: Work, cluster: Cluster, dtype: str, stack: Stack, constants: Constants) -> Figure:
    """Seconds of all `count` of an operation, without what starting them costs.

    Where the cluster was probed, its own rates are used.
    """
    if work.kind == "memory":
        return work.count * memory_time(work.moved * stack.traffic, cluster)
    if cluster.measured is not None:
        return work.count * _measured_time(work, cluster.measured, dtype)
    if work.kind == "attention":
        return work.count * attention_time(work, cluster.device, dtype, stack.attention, constants)
    rate = constants.matmul * (constants.experts if work.what.startswith("mlp.experts") else 1.0)
    return work.count * matmul_time(work, cluster.device, stack.dtype or dtype, rate)


# --- what was measured ---------------------------------------------------------------------------------


def _measured_time(work: Work, measured: Measured, dtype: str) -> Figure:
    """Seconds by a probe's rates; one that did not measure this dtype says what it knows of another."""
    if work.kind == "attention":
        attention = measured.attention.get(dtype) or next(iter(measured.attention.values()))
        return work.flops * work.causal / attention
    square = measured.matmul.get(dtype) or next(iter(measured.matmul.values()))
    tall = measured.tall.get(dtype) or square
    one = work.flops / np.asarray(work.batch, dtype=float)
    shortest = np.minimum(np.minimum(work.rows, work.inner), work.columns).astype(float)
    # Between a cube and a product whose long side is TALL times its shortest: by how much work it is.
    cube, longest = 2 * shortest**3, 2 * TALL * shortest**3
    tallness = np.clip(np.log(one / cube) / np.log(TALL), 0.0, 1.0)
    rate: Figure = rate_between(square, cube) ** (1 - tallness) * rate_between(tall, longest) ** tallness
    return work.flops / rate


def rate_between(measured: Sequence[tuple[float, float]], size: Figure) -> Figure:
    """The rate at a size, from pairs (size, rate): linear in the logarithms, and level outside them."""
    sizes, rates = np.log(np.asarray(measured, dtype=float).T)
    found: Figure = np.exp(np.interp(np.log(np.maximum(size, 1.0)), sizes, rates))
    return found
