"""The loss on documents that are never trained on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fivefold.config import Job
from fivefold.data.corpus import Corpus
from fivefold.training.build import Built


@torch.no_grad()
def validate(job: Job, built: Built, corpus: Corpus) -> float:
    """The mean loss per token over the held-out batches: the same ones every time, on any layout."""
    layout = built.mesh.layout
    totals = torch.zeros(2, dtype=torch.float64, device=built.step.device)
    built.model.eval()
    with corpus.heldout_loader(
        global_batch=job.training.global_batch,
        micro_batch=built.step.micro_batch,
        rank=built.mesh.data_rank,
        ranks=layout.data_ranks,
    ) as loader:
        batches = iter(loader)
        for _ in range(job.training.validate_batches):
            for batch in next(batches):
                moved = batch.to(built.step.device, non_blocking=True)
                loss = built.model(**moved.inputs)
                totals += torch.stack([loss.double(), loss.new_tensor(batch.valid, dtype=torch.float64)])
    built.model.train()
    release_gathered(built)
    if layout.ranks > 1:
        dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def release_gathered(built: Built) -> None:
    """Free weights that a forward without a backward left gathered."""
    for module in built.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
