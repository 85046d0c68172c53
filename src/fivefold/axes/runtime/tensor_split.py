"""Turning a whole model into one tp rank's part of it: its parameters, and the layers that use them."""

from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import nn

from fivefold.axes import tensor
from fivefold.axes.expert import is_expert
from fivefold.axes.runtime import tensor_layers
from fivefold.axes.runtime.expert_split import compute_locally
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.tensor_layers import LocalLayer, Stream, share_parameters
from fivefold.axes.runtime.tensor_overlap import overlap_messages
from fivefold.axes.runtime.vocabulary import VocabularyHead, first_token, look_up
from fivefold.config import Job
from fivefold.models.decoder import Block, Decoder
from fivefold.models.moe import Moe
from fivefold.models.spec import ModelSpec


def split(model: Decoder, mesh: Mesh, job: Job) -> Decoder:
    """Give this rank its part of every layer, in place. The model must be on the meta device.

    Every parameter becomes a DTensor on the mesh of tp. (Expert parameters under ep are left to that axis.)
    """
    if mesh.layout.tp == 1:
        return model
    share_parameters(model, mesh, spread=False)
    stream = Stream(mesh.group("tp"), mesh.layout.tp, mesh.place.tp, job.layout.sequence_parallel)
    for name, layer in list(model.named_modules()):
        if (shared := _shared(name, layer, model.spec, stream)) is not None:
            model.set_submodule(name, shared)
    for block in model.blocks.values():
        if isinstance(block.mlp, Moe):
            if mesh.layout.ep == 1:
                compute_locally(block.mlp.experts, stream.ranks)
            # What experts add is a partial sum, and leaves once for all of them.
            block.mlp.register_forward_hook(lambda module, args, partial_sum: stream.leave(partial_sum))
        if job.communication.tp_overlap:
            overlap_messages(cast(Block, block), mesh.along("tp").get_group().group_name)
    if model.head is not None:
        model.set_submodule("head", VocabularyHead(model.head, stream, model.spec.vocab_size))
    return model


def _shared(name: str, layer: Any, spec: ModelSpec, stream: Stream) -> nn.Module | None:
    """What takes the place of a layer; None where it has no parameters of its own, or is of experts."""
    if is_expert(f"{name}."):
        return None
    if name == "embedding.tokens":
        return LocalLayer(layer, partial(look_up, stream, first_token(spec.vocab_size, stream)))
    if name == "embedding.positions":
        return LocalLayer(layer, partial(tensor_layers.positions, stream))
    if name.endswith("norm"):
        compute = partial(tensor_layers.norm, type(layer), layer.eps)
        # Norms of heads are inside a layer that the ranks share, some others behind it; the rest enter it.
        then = None if name.endswith((*tensor.OF_A_RANKS_HEADS, *tensor.OF_THE_STREAM)) else stream.enter
        return LocalLayer(layer, compute, then=then)
    if name.endswith(tensor.OF_KEY_VALUE_HEADS):
        rows = _own_key_rows(spec, stream)
        return LocalLayer(layer, tensor_layers.column, rows, linear=F.linear)
    if name.endswith(tensor.SPLIT_BY_OUTPUT):
        return LocalLayer(layer, tensor_layers.column, linear=F.linear)
    if name.endswith(".mlp.shared.down"):
        return LocalLayer(layer, partial(tensor_layers.partial_sum, stream.ranks), linear=F.linear)
    if name.endswith(tensor.SPLIT_BY_INPUT):
        return LocalLayer(layer, partial(tensor_layers.row, stream), linear=F.linear)
    return LocalLayer(layer, tensor_layers.router) if name.endswith(".mlp.router") else None


def _own_key_rows(spec: ModelSpec, stream: Stream) -> slice | None:
    """The rows of this rank's one key head, where every rank holds all of them; None where they are split."""
    if spec.kv_heads % stream.ranks == 0:
        return None
    head = stream.rank * spec.kv_heads // stream.ranks
    return slice(head * spec.head_dim, (head + 1) * spec.head_dim)
