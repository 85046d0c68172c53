"""The loss on documents that are never trained on."""

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
    step, place = built.step, built.mesh.place
    totals = torch.zeros(2, dtype=torch.float64, device=step.device)
    for part in built.parts:
        part.eval()
    with corpus.heldout_loader(
        global_batch=job.training.global_batch,
        micro_batch=built.step.micro_batch,
        rank=built.mesh.data_rank,
        ranks=layout.data_ranks,
    ) as loader:
        batches = iter(loader)
        for number in range(job.training.validate_batches):
            step.tell("validation", number + 1)
            micro_batches = next(batches)
            inputs = [step.inputs(batch) for batch in micro_batches]
            if step.pipeline is not None:
                totals[0] += step.pipeline.evaluate(inputs)
            else:
                for keywords in inputs:
                    totals[0] += built.model(**keywords)
            totals[1] += sum(batch.valid for batch in micro_batches)
    for part in built.parts:
        part.train()
    release_gathered(built)
    # The ranks of a tp group have the same loss; those of cp and pp groups the same tokens to count.
    totals[0] *= place.tp == 0
    totals[1] *= place.cp == place.tp == place.pp == 0
    if layout.ranks > 1:
        dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def release_gathered(built: Built) -> None:
    """Free weights that a forward without a backward left gathered."""
    for part in built.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
