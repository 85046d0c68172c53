"""How long one operation takes on one device: matrix products by their shape, attention, and moving bytes.

A matrix product is cut into tiles, one for each multiprocessor at a time. It is slower than the peak where
the tiles do not fill the last round ("wave quantisation"), where small tiles are needed to have enough of
them, where the inner dimension is too short to pay for a tile's beginning and end, and where rows are not
aligned to the 128 bytes that memory and tensor cores take at a time.
"""

import numpy as np

from fivefold.hardware.cluster import TALL, Cluster, Measured
from fivefold.hardware.devices import Device
from fivefold.hardware.links import PCIE_4
from fivefold.ledger.setup import Figure
from fivefold.ledger.work import PIECE, Work
from fivefold.planner.time.constants import Constants, part_at, peak, rate_between
from fivefold.planner.time.stack import Stack

TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.5))
"""Rows, columns, and a tile's rate relative to the largest one's: a smaller one reads more for its work."""
TILE_ENDS = 96
"""A tile's beginning and end cost as much as this many steps along the inner dimension."""
ALIGNED = 64
"""Elements of 16 bits in 128 bytes."""
FP8 = "float8"
"""What devices call the format of products in 8 bits. They are taken to reach the same part of their peak as
those in 16 bits; nothing was measured yet. A probe's rates are those of 16 bits: there they gain nothing."""
MISALIGNED = 0.75
"""The rate of products with a dimension that is not aligned. BLOOM's engineers measured 94 TFLOP/s with a
hidden size of 14,400 and 120 with 13,824 (BigScience, chronicles of tr11-176B)."""
BANDWIDTH = 0.85
"""Part of the memory's bandwidth that streaming kernels reach."""
HOST_LINK = 0.8
"""Part of the rate of a link to the host that large copies reach, both ways at once: an assumption."""
COPIED = 1.8
"""How many times longer bytes take that are copied into another order, or cast and added in one: on an H200,
kernels around pieces of attention moved 2.1 to 2.5 TB/s."""
SMS = 108
"""Multiprocessors of a device whose number is not known."""

FLASH = {
    "flash-1": ((0.42, 0.25, 0.2), (0.38, 0.22, 0.18)),
    "flash-2": ((0.60, 0.35, 0.3), (0.52, 0.30, 0.26)),
    "flash-3": ((0.62, 0.60, 0.6), (0.54, 0.50, 0.50)),
}
"""Attention kernel -> part of the peak, forward and backward, that long sequences reach on an A100, an H100
and a B200 (`FLASH_PEAKS`): the faster the tensor cores, the less of them older kernels use. Dao 2023 (arXiv
2307.08691) figures 4 to 7, Shah et al. 2024 (arXiv 2407.08608) figures 5 and 6; of the B200 an assumption.
Measured on an H200 at 8192 tokens, causal (torch 2.11): flash-2 0.32 and 0.29, cuDNN's 0.63 and 0.53."""
FLASH_PEAKS = (312e12, 989.4e12, 2250e12)
FLASH_RAMP = 256
"""A query that sees this many keys, on average, is worked on at half the rate of one that sees many. On an
H200, flash-2 over blocks of 512, 1024, 2048 and 4096 keys reached 254, 314, 346 and 360 TFLOP/s."""

SCORE_BYTES = {"forward": 14.0, "backward": 24.0}
"""Moved for each score by unfused attention in 16 bits: product, mask and softmax, dropout, product."""


def matmul_time(work: Work, device: Device, dtype: str, fraction: float) -> Figure:
    """Seconds of one matrix product."""
    sms = device.sms or SMS
    rate = peak(device, dtype) * fraction
    sizes = (work.rows, work.inner, work.columns, work.batch)
    rows, inner, columns, batch = (np.asarray(size, dtype=float) for size in sizes)
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
    fastest = peak(device, dtype)
    known = zip(FLASH_PEAKS, FLASH[kernel][int(backward)], strict=True)
    rate = fastest * part_at(fastest, known) * constants.attention
    head: Figure = np.minimum(1.0, 0.7 + 0.3 * work.inner / 128.0)
    seen = work.columns * work.causal
    return work.flops * work.causal / (rate * head * seen / (seen + FLASH_RAMP))


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


def host_time(moved: Figure, cluster: Cluster) -> Figure:
    """Seconds to bring some bytes from the host's memory to the device's, while as many go back.

    PCIe 4.0 where the link is not known. Where the host computes they are copied in its own memory.
    """
    if cluster.device.is_host:
        return memory_time(4 * moved, cluster)
    return moved / (HOST_LINK * (cluster.device.host_bandwidth or PCIE_4.bandwidth))


def work_time(work: Work, cluster: Cluster, dtype: str, stack: Stack, constants: Constants) -> Figure:
    """Seconds of all `count` of an operation, without what starting them costs.

    Where the cluster was probed, its own rates are used.
    """
    if work.kind == "memory":
        return work.count * memory_time(work.moved * stack.traffic, cluster)
    copies = memory_time(COPIED * work.copied, cluster) if stack.pieces else 0.0
    if cluster.measured is not None:
        return work.count * (_measured_time(work, cluster.measured, dtype) + copies)
    if work.kind == "attention":
        kernel = stack.pieces or stack.attention if work.what == PIECE else stack.attention
        return work.count * (attention_time(work, cluster.device, dtype, kernel, constants) + copies)
    rate = constants.matmul * (constants.experts if work.what.startswith("mlp.experts") else 1.0)
    took = matmul_time(work, cluster.device, stack.dtype or dtype, rate)
    if np.any(work.fp8):
        took = np.where(work.fp8, matmul_time(work, cluster.device, FP8, rate), took)
    return work.count * took


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
