"""Turning a whole model into one tp rank's part of it: its parameters, and the layers that use them."""

from typing import Any, cast

from torch import nn

from fivefold.axes import tensor
from fivefold.axes.expert import is_expert
from fivefold.axes.runtime import tensor_layers as layers
from fivefold.axes.runtime.expert_layers import compute_locally
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.tensor_overlap import overlap_messages
from fivefold.axes.runtime.vocabulary import VocabularyEmbedding, VocabularyHead
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
    share_parameters(model, mesh)
    share_layers(model, mesh, job)
    return model


def share_parameters(model: Decoder, mesh: Mesh) -> None:
    """Replace every parameter by a DTensor of this rank's part, on the meta device; tied ones once."""
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        if is_expert(f"{path}.") and mesh.layout.ep > 1:
            continue
        for name, whole in list(module.named_parameters(recurse=False)):
            if whole not in shared:
                dimension = tensor.split_dimension(model.spec, f"{path}.{name}", mesh.layout.tp)
                shared[whole] = layers.part_of(whole, [dimension], mesh.along("tp"))
            module.register_parameter(name, shared[whole])


def share_layers(model: Decoder, mesh: Mesh, job: Job) -> None:
    """Replace every layer that has parameters by one that computes with this rank's part of them."""
    stream = layers.Stream(mesh.group("tp"), mesh.layout.tp, mesh.place.tp, job.layout.sequence_parallel)
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
            overlap_messages(cast(Block, block))
    if model.head is not None:
        model.set_submodule("head", VocabularyHead(model.head, stream, model.spec.vocab_size))


def _shared(name: str, layer: Any, spec: ModelSpec, stream: layers.Stream) -> nn.Module | None:
    """What takes the place of a layer; None where it has no parameters of its own, or is of experts."""
    if is_expert(f"{name}."):
        return None
    if name == "embedding.tokens":
        return VocabularyEmbedding(layer, stream)
    if name == "embedding.positions":
        return layers.Positions(layer, stream)
    if name.endswith("norm"):
        of_heads = name.endswith(tensor.OF_A_RANKS_HEADS)
        return layers.Norm(layer, None if of_heads else stream)
    if name.endswith(tensor.OF_KEY_VALUE_HEADS):
        return layers.Column(layer, _own_key_rows(spec, stream))
    if name.endswith(tensor.SPLIT_BY_OUTPUT):
        return layers.Column(layer)
    if name.endswith(".mlp.shared.down"):
        return layers.PartialRow(layer, stream.ranks)
    if name.endswith(tensor.SPLIT_BY_INPUT):
        return layers.Row(layer, stream)
    return layers.WholeRouter(layer) if name.endswith(".mlp.router") else None


def _own_key_rows(spec: ModelSpec, stream: layers.Stream) -> slice | None:
    """The rows of this rank's one key head, where every rank holds all of them; None where they are split."""
    if spec.kv_heads % stream.ranks == 0:
        return None
    head = stream.rank * spec.kv_heads // stream.ranks
    return slice(head * spec.head_dim, (head + 1) * spec.head_dim)
