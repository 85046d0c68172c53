"""Making a model's attention reach across cp ranks, and cutting a batch for one of them."""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fivefold.axes.layout import Place
from fivefold.axes.runtime import zigzag
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.ring import LocalContext, RingCore
from fivefold.axes.runtime.ulysses import UlyssesCore
from fivefold.config import Job
from fivefold.models.attention import Attention, Context, make_context, places
from fivefold.models.decoder import Decoder


def split(model: Decoder, mesh: Mesh, job: Job) -> Decoder:
    """Make the model's attention reach across the cp ranks, in place; it then takes `local_inputs`."""
    group = mesh.group("cp")
    if group is None:
        return model
    kind = cast(str, job.layout.cp_kind)
    for block in model.blocks.values():
        attention = cast(Attention, block.attention)
        core = UlyssesCore(attention.core, group) if kind == "ulysses" else RingCore(group, kind)
        attention.core = core  # type: ignore[assignment]
    model.make_context = partial(local_context, job, mesh.place)  # type: ignore[assignment, method-assign]
    return model


def local_inputs(inputs: Mapping[str, Tensor | None], place: Place, job: Job) -> dict[str, Tensor | None]:
    """What the model takes on the rank at `place`, from what it takes on one process.

    Call it before the batch goes to a device: how many documents a rank holds depends on the batch.

    tokens, targets  [B, S] -> [B, S/cp], this rank's
    positions        [S/cp], or with documents [B, S/cp]: places in the whole sequence, or in the document
    documents        [B, S], whole: attention reaches across the ranks
    boundaries       where documents begin: among this rank's tokens, or under ulysses in the whole batch
    """
    if job.layout.cp == 1:
        return dict(inputs)
    tokens, documents, targets = inputs["tokens"], inputs.get("documents"), inputs.get("targets")
    assert tokens is not None
    boundaries = None
    if job.layout.cp_kind == "ulysses":
        boundaries = inputs.get("boundaries")
    elif documents is not None:
        boundaries = zigzag.local_boundaries(documents, place.cp, job.layout.cp)
    return {
        "tokens": local_part(tokens, place, job),
        "targets": None if targets is None else local_part(targets, place, job),
        "documents": documents,
        "positions": local_part(places(tokens, documents), place, job),
        "boundaries": boundaries,
    }


def local_context(
    job: Job, place: Place, x: Tensor, positions: Tensor, documents: Tensor | None, boundaries: Tensor | None
) -> Context | LocalContext:
    """As `make_context`, from `local_inputs`, for the cores. Rotary tables are of this rank's tokens."""
    spec, ranks = job.spec, job.layout.cp
    rope = make_context(spec.model_copy(update={"sliding_window": None}), x, positions, None).rope
    if job.layout.cp_kind == "ulysses":
        without_tables = spec.model_copy(update={"positions": "learned"})
        whole = torch.arange(positions.shape[-1] * ranks, device=x.device)
        return make_context(without_tables, x, whole, documents, boundaries)._replace(rope=rope)
    if documents is None or boundaries is None:
        return LocalContext(rope, [])
    limits = zigzag.visible_counts(documents, place.cp, ranks)
    limits[place.cp] = boundaries
    return LocalContext(rope, limits)


def local_part(x: Tensor, place: Place, job: Job) -> Tensor:
    """[..., S] -> [..., S/cp]: what is of the tokens that the rank at `place` holds, in its order."""
    if job.layout.cp_kind != "ulysses":
        return zigzag.local_part(x, place.cp, job.layout.cp)
    # Not `contiguous`: a part of one row counts as that already, and keeps the strides of the whole.
    return x.chunk(job.layout.cp, -1)[place.cp].clone(memory_format=torch.contiguous_format)
