"""The context axis: every rank holds a part of each sequence, and attention reaches across the ranks.

    ring       keys and values travel from rank to rank under the attention to those that are there already
    allgather  keys and values are gathered before attention, and again in backward
    ulysses    tokens are exchanged for heads: each rank attends for some heads over the whole sequence

Ring and allgather hold the sequence in zigzag chunks (`zigzag`), which makes causal work even; ulysses holds
consecutive parts. Everything but attention works token by token and never notices; positions are worked out
for the whole sequence and cut with it. Packed documents stay apart without a mask of the whole sequence where
the kernels can do without one.

To the weights, context ranks are data ranks: their gradients are summed along with the others'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fivefold.axes.data import micro_batches
from fivefold.axes.layout import Layout, Mesh, Place
from fivefold.axes.pipeline import stages, stages_of
from fivefold.ledger.ledger import Ledger, Message, Operation
from fivefold.ledger.precision import precision_named
from fivefold.ledger.recompute import segment_length
from fivefold.problems import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from fivefold.config import Job
    from fivefold.models.decoder import Decoder


# --- check -------------------------------------------------------------------------------------------------


def check(job: Job) -> list[Problem]:
    """Why this job's context split is impossible; empty when it is possible."""
    cp, kind, tp = job.layout.cp, job.layout.cp_kind, job.layout.tp
    if cp == 1:
        return []
    spec, length = job.spec, job.training.seq_len
    problems = []
    unit = cp if kind == "ulysses" else 2 * cp
    if length % unit:
        cut = f"{cp} consecutive parts" if kind == "ulysses" else f"2 x {cp} chunks, two for each rank"
        message = f"{length} does not divide into {cut} (layout.cp = {cp}, layout.cp_kind = '{kind}')"
        problems.append(
            Problem("training.seq_len", message, f"Use training.seq_len = {_nearest(length, unit)}.")
        )
    if kind == "ulysses" and spec.heads % (cp * tp):
        degrees = f"layout.cp = {cp}" + (f" x layout.tp = {tp}" if tp > 1 else "")
        fitting = [n for n in range(1, cp) if spec.heads % (n * tp) == 0]
        choice = f"layout.cp = {fitting[-1]}, " if fitting else ""
        problems.append(
            Problem(
                "layout.cp",
                f"{spec.heads} heads do not split over {degrees} under layout.cp_kind = 'ulysses'",
                f"Use {choice}layout.cp_kind = 'ring', or model.heads = {_nearest(spec.heads, cp * tp)}.",
            )
        )
    if kind != "ulysses" and spec.sliding_window is not None and spec.sliding_window < length:
        problems.append(
            Problem(
                "layout.cp_kind",
                f"'{kind}' with model.sliding_window = {spec.sliding_window}",
                "Use layout.cp_kind = 'ulysses', which attends over whole sequences.",
            )
        )
    return problems


def _nearest(number: int, unit: int) -> str:
    """The multiples of `unit` around `number`, in words."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


# --- split -------------------------------------------------------------------------------------------------


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
    from fivefold.axes import zigzag
    from fivefold.models.attention import places

    rank, ranks = place.cp, job.layout.cp
    kind = job.layout.cp_kind

    def cut(x: Tensor) -> Tensor:
        part = x.chunk(ranks, -1)[rank] if kind == "ulysses" else zigzag.local_part(x, rank, ranks)
        return part.contiguous()

    tokens, documents, targets = inputs["tokens"], inputs.get("documents"), inputs.get("targets")
    assert tokens is not None
    boundaries = inputs.get("boundaries")
    if kind != "ulysses":
        boundaries = None if documents is None else zigzag.local_boundaries(documents, rank, ranks)
    return {
        "tokens": cut(tokens),
        "targets": None if targets is None else cut(targets),
        "documents": documents,
        "positions": cut(places(tokens, documents)),
        "boundaries": boundaries,
    }


def sent_kv_heads(kv_heads: int, cp: int) -> int:
    """How many key heads ulysses deals out: as many to each rank, so some go to several ranks if need be."""
    return math.lcm(kv_heads, cp)


def split(model: Decoder, mesh: Mesh, job: Job) -> Decoder:
    """Make the model's attention reach across the cp ranks, in place; it then takes `local_inputs`."""
    group = mesh.group("cp")
    if group is None:
        return model
    from fivefold.axes.ring import RingCore, local_context
    from fivefold.axes.ulysses import UlyssesCore, whole_context
    from fivefold.models.attention import Attention

    kind = cast(str, job.layout.cp_kind)
    for block in model.blocks.values():
        attention = cast(Attention, block.attention)
        core = UlyssesCore(attention.core, group) if kind == "ulysses" else RingCore(group, kind)
        attention.core = core  # type: ignore[assignment]
    if kind == "ulysses":
        make_context: Any = partial(whole_context, model.spec, mesh.layout.cp)
    else:
        make_context = partial(local_context, model.spec, mesh.position("cp"), mesh.layout.cp)
    model.make_context = make_context  # type: ignore[method-assign]
    return model


# --- account -----------------------------------------------------------------------------------------------


def account(ledger: Ledger, job: Job, place: Place) -> Ledger:
    """Add the messages of attention that the rank at `place` sends in one steady optimizer step.

    Recomputed layers send their forward messages again in backward; selective recomputation keeps what they
    brought.
    """
    layout = Layout.of(job)
    spec, ranks = job.spec, layout.cp
    if ranks == 1:
        return ledger
    cut = stages(job)
    blocks = sum(part.startswith("blocks.") for stage in stages_of(job, place.pp) for part in cut[stage])
    each = blocks * micro_batches(job)
    again = each if segment_length(job.training.recompute, spec.layers) is not None else 0
    forward, backward = _messages_of_one_attention(job, ranks, layout.tp)
    for operation, payload, count, hidden in forward:
        ledger = ledger.send(
            Message(operation, payload, "cp", ranks, count * each, "forward", "forward" if hidden else None),
            Message(
                operation, payload, "cp", ranks, count * again, "backward", "backward" if hidden else None
            ),
        )
    for operation, payload, count, hidden in backward:
        under = "backward" if hidden else None
        ledger = ledger.send(Message(operation, payload, "cp", ranks, count * each, "backward", under))
    return ledger


_Sent = tuple[Operation, int, int, bool]
"""Operation, payload bytes, how often, and whether it runs under compute."""


def _messages_of_one_attention(job: Job, ranks: int, tp: int) -> tuple[list[_Sent], list[_Sent]]:
    """What one attention layer sends for one micro-batch, forward and backward."""
    spec, precision = job.spec, precision_named(job.training.precision)
    assert job.training.micro_batch is not None
    kv_heads = spec.kv_heads // tp if spec.kv_heads % tp == 0 else 1
    head = job.training.micro_batch * job.training.seq_len // ranks * spec.head_dim  # elements of one head
    kv = 2 * kv_heads * head
    kv_bytes = kv * precision.compute_bytes
    grad_bytes = kv * max(4, precision.compute_bytes)  # added up in float32 or wider
    if job.layout.cp_kind == "ring":
        travel: list[_Sent] = [(way, kv_bytes, ranks - 1, True) for way in ("send", "recv")]
        home: list[_Sent] = [(way, grad_bytes, ranks, True) for way in ("send", "recv")]
        return travel, travel + home
    if job.layout.cp_kind == "allgather":
        gather: _Sent = ("all_gather", kv_bytes * ranks, 1, False)
        return [gather], [gather, ("reduce_scatter", grad_bytes * ranks, 1, False)]
    heads = spec.heads // tp
    sent = heads + 2 * sent_kv_heads(kv_heads, ranks)
    both: list[_Sent] = [("all_to_all", n * head * precision.compute_bytes, 1, False) for n in (sent, heads)]
    return both, both
