"""The loss on documents that are never trained on."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fivefold.config import Job
from fivefold.data.corpus import Corpus
from fivefold.training.build import Built


@torch.no_grad()
def validate(
    job: Job, built: Built, corpus: Corpus, stop: Callable[[], bool] = lambda: False
) -> float | None:
    """The mean loss per token over the held-out batches: the same ones every time, on any layout.

    stop  whether this rank was asked to stop. Ranks tell each other after every batch, and all of them
          give up after the same one: then there is no loss.
    """
    layout = built.mesh.layout
    step, place = built.step, built.mesh.place
    totals = torch.zeros(3, dtype=torch.float64, device=step.device)
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
            figures = torch.zeros_like(totals)
            inputs = [step.inputs(batch) for batch in micro_batches]
            if step.pipeline is not None:
                figures[0] += step.pipeline.evaluate(inputs)
            else:
                for keywords in inputs:
                    figures[0] += built.model(**keywords)
            figures[1] += sum(batch.valid for batch in micro_batches)
            figures[0] *= place.tp == 0  # the ranks of a tp group have the same loss
            figures[1] *= place.speaks_for_sequences
            figures[2] += stop()
            if layout.ranks > 1:
                dist.all_reduce(figures)
            totals += figures
            if totals[2] > 0:
                break
    for part in built.parts:
        part.train()
    release_gathered(built)
    return None if totals[2] > 0 else float(totals[0] / totals[1])


def release_gathered(built: Built) -> None:
    """Free weights that a forward without a backward left gathered."""
    for part in built.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
