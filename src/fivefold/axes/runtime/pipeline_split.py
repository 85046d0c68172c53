"""Cutting a model into the stages of one rank."""

import copy

from torch import nn

from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.stages import parts_of
from fivefold.config import Job
from fivefold.models.decoder import Decoder


def split(model: Decoder, mesh: Mesh, job: Job) -> list[Decoder]:
    """The stages of this rank in forward order: models with some of the blocks, and with embedding and head
    only where they begin and end. Parameters keep the names they have in the whole model.

    Of a tied model first and last stage have a copy each of the embedding, the last as `head.output.weight`.
    The model's parameters must be on the meta device: blocks move to their stage, the rest is copied.
    """
    if job.layout.pp == 1:
        return [model]
    blocks, model.blocks = model.blocks, nn.ModuleDict()
    found = []
    for parts in parts_of(job, mesh.place.pp).values():
        names = [part.partition(".")[2] for part in parts if part.startswith("blocks.")]
        stage = copy.deepcopy(model)
        stage.blocks = nn.ModuleDict({name: blocks[name] for name in names})
        if "embedding" not in parts:
            stage.embedding = None
        if "head" not in parts:
            stage.head = None
        found.append(stage)
    return found
