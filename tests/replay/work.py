"""The FLOPs of one rank in one optimizer step, with what recomputation repeats: as a counter sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.axes.layout import Place
from fivefold.axes.stages import stages, stages_of
from fivefold.ledger.recompute import segment_length
from fivefold.ledger.setup import Setup
from fivefold.ledger.work import Work, block_work, head_work, recomputed

if TYPE_CHECKING:
    from fivefold.config import Job


def step_flops(job: Job, place: Place | None = None) -> int:
    """Of the rank at `place`, the first one by default. Attention is a full square, masked or not."""
    place, setup = place or Place(), Setup.of(job)
    cut = stages(job)
    total = 0.0
    for stage in stages_of(job, place.pp):
        layers = sum(part.startswith("blocks.") for part in cut[stage])
        block = block_work(setup)
        total += layers * _sum(block) + _again(job.training.recompute, layers, block)
        if "head" in cut[stage]:
            total += _sum(head_work(setup))
    return round(total * int(setup.micro_batches))


def _again(recompute: str, layers: int, block: list[Work]) -> float:
    """What is repeated of a stage's blocks."""
    length = segment_length(recompute, layers)
    if length is None:
        return 0.0
    segments = -(-layers // length)
    ends = segments * _sum(recomputed(block, last=True))
    return ends + (layers - segments) * _sum(recomputed(block))


def _sum(work: list[Work]) -> float:
    return float(sum(item.flops * item.count for item in work))
