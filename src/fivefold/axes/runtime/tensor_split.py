"""Turning a whole model into one tp rank's part of it: its parameters, and the layers that use them."""

from __future__ import annotations

from typing import cast

from torch import nn

from fivefold.axes.expert import is_expert
from fivefold.axes.runtime.expert_layers import compute_locally
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.tensor_layers import (
    Column,
    Norm,
    PartialRow,
    Positions,
    Row,
    Stream,
    WholeRouter,
    part_of,
)
from fivefold.axes.runtime.tensor_overlap import overlap_messages
from fivefold.axes.runtime.vocabulary import VocabularyEmbedding, VocabularyHead
from fivefold.axes.tensor import split_dimension
from fivefold.config import Job
from fivefold.models.decoder import Block, Decoder
from fivefold.models.mlp import Mlp
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
    """Replace every parameter by a DTensor that holds this rank's part, on the meta device; tied ones once.

    Experts that `ep` ranks split too are left to that axis, their layers as well.
    """
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        if is_expert(f"{path}.") and mesh.layout.ep > 1:
            continue
        for name, whole in list(module.named_parameters(recurse=False)):
            if whole not in shared:
                dimension = split_dimension(model.spec, f"{path}.{name}", mesh.layout.tp)
                shared[whole] = part_of(whole, [dimension], mesh.along("tp"))
            module.register_parameter(name, shared[whole])


def share_layers(model: Decoder, mesh: Mesh, job: Job) -> None:
    """Replace every layer that has parameters by one that computes with this rank's part of them."""
    spec = model.spec
    stream = Stream(mesh.group("tp"), mesh.layout.tp, mesh.place.tp, job.layout.sequence_parallel)
    if model.embedding is not None:
        model.embedding.set_submodule("tokens", VocabularyEmbedding(model.embedding.tokens, stream))
        if model.embedding.positions is not None:
            model.embedding.set_submodule("positions", Positions(model.embedding.positions, stream))
    for block in model.blocks.values():
        _share_block(cast(Block, block), spec, stream, experts_too=mesh.layout.ep == 1)
        if job.communication.tp_overlap:
            overlap_messages(cast(Block, block))
    if model.head is not None:
        model.head.set_submodule("norm", Norm(model.head.norm, stream))
        model.head.set_submodule("output", Column(model.head.output))
        model.set_submodule("head", VocabularyHead(model.head, stream, spec.vocab_size))


def _share_block(block: Block, spec: ModelSpec, stream: Stream, experts_too: bool) -> None:
    block.set_submodule("attention_norm", Norm(block.attention_norm, stream))
    attention = block.attention
    attention.set_submodule("query", Column(attention.query))
    rows = _own_key_rows(spec, stream)
    attention.set_submodule("key", Column(attention.key, rows))
    attention.set_submodule("value", Column(attention.value, rows))
    attention.set_submodule("output", Row(attention.output, stream))
    if attention.query_norm is not None and attention.key_norm is not None:
        attention.set_submodule("query_norm", Norm(attention.query_norm))
        attention.set_submodule("key_norm", Norm(attention.key_norm))
    if block.mlp_norm is not None:
        block.set_submodule("mlp_norm", Norm(block.mlp_norm, stream))
    if isinstance(block.mlp, Moe):
        _share_moe(block.mlp, stream, experts_too)
    else:
        _share_mlp(block.mlp, Row(block.mlp.down, stream))


def _share_mlp(mlp: Mlp, down: nn.Module) -> None:
    if mlp.gate is not None:
        mlp.set_submodule("gate", Column(mlp.gate))
    mlp.set_submodule("up", Column(mlp.up))
    mlp.set_submodule("down", down)


def _share_moe(moe: Moe, stream: Stream, experts_too: bool) -> None:
    """Every rank routes all tokens. What experts add is a partial sum, and leaves once for all of them."""
    moe.set_submodule("router", WholeRouter(moe.router))
    if moe.shared is not None:
        _share_mlp(moe.shared, PartialRow(moe.shared.down, stream.ranks))
    if experts_too:
        compute_locally(moe.experts, stream.ranks)
    moe.register_forward_hook(lambda module, args, partial_sum: stream.leave(partial_sum))


def _own_key_rows(spec: ModelSpec, stream: Stream) -> slice | None:
    """The rows of this rank's one key head, where every rank holds all of them; None where they are split."""
    if spec.kv_heads % stream.ranks == 0:
        return None
    head = stream.rank * spec.kv_heads // stream.ranks
    return slice(head * spec.head_dim, (head + 1) * spec.head_dim)
