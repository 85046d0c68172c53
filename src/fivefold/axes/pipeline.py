"""The pipeline axis: ranks hold different layers, and micro-batches flow through them.

The model is cut into stages of neighbouring layers; a schedule (`schedules/`) says which stages a rank
holds and when it computes which micro-batch. Between stages only the residual stream travels: forward its
values, backward their gradients. `axes/pipeline_runner.py` runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fivefold.axes.layout import Layout, Mesh, Place
from fivefold.axes.pieces import pieces
from fivefold.axes.sharding import shard_count
from fivefold.axes.stages import rank_of, schedule_of, stage_count, stages, stages_of
from fivefold.ledger.ledger import Ledger, Message, Operation, repeated
from fivefold.ledger.setup import Number, Setup
from fivefold.problems import Problem

if TYPE_CHECKING:
    from fivefold.config import Job
    from fivefold.models.decoder import Decoder


# --- check ---------------------------------------------------------------------------------------------


def check(job: Job) -> list[Problem]:
    """Why this job's pipeline is impossible; empty when it is possible."""
    if job.layout.pp == 1:
        return []
    return [*_stage_problems(job), *_micro_batch_problems(job), *_reduce_problems(job)]


def _stage_problems(job: Job) -> list[Problem]:
    schedule, virtual, pp = schedule_of(job), job.layout.virtual_stages or 1, job.layout.pp
    wanted = schedule.stages or virtual
    if virtual != wanted:
        what = "one stage" if wanted == 1 else f"{wanted} stages"
        others = "interleaved, looped-bfs or zero-bubble"
        hint = f"Use layout.virtual_stages = {wanted}, or layout.schedule = {others}."
        message = f"{virtual}, but under '{schedule.name}' a rank holds {what}"
        return [Problem("layout.virtual_stages", message, hint)]
    layers, needed = job.spec.layers, stage_count(job)
    if layers >= needed:
        return []
    each = f" x {virtual} stages each" if virtual > 1 else ""
    fixes = [f"layout.pp = {layers // virtual}"] if layers // virtual else []
    if virtual > 1 and schedule.stages is None and layers >= pp:
        fixes.append(f"layout.virtual_stages = {layers // pp}")
    fixes.append(f"model.layers = {needed}")
    message = f"{pp} ranks{each} make {needed} stages, but the model has {layers} layers"
    return [Problem("layout.pp", message, f"Every stage needs a layer: use {_either(fixes)}.")]


def _micro_batch_problems(job: Job) -> list[Problem]:
    schedule, pp, count = schedule_of(job), job.layout.pp, int(Setup.of(job).micro_batches)
    if schedule.allows(pp, count):
        return []
    assert job.training.micro_batch is not None
    unit = job.training.micro_batch * Layout.of(job).data_ranks
    below = next((n for n in range(count - 1, 0, -1) if schedule.allows(pp, n)), None)
    above = next(n for n in range(count + 1, count + 2 * pp + 1) if schedule.allows(pp, n))
    fixes = [f"training.global_batch = {n * unit}" for n in (below, above) if n]
    share = count * job.training.micro_batch
    smaller = [
        size
        for size in range(1, job.training.micro_batch)
        if share % size == 0 and schedule.allows(pp, share // size)
    ]
    if smaller:
        fixes.append(f"training.micro_batch = {smaller[-1]}")
    least = schedule.fewest(pp)
    needs = f"at least {least}" if count < least else f"a multiple of {count // pp}"
    message = f"{count} micro-batches a step, but '{schedule.name}' on {pp} ranks needs {needs}"
    return [Problem("training.global_batch", message, f"Use {_either(fixes)}.")]


def _reduce_problems(job: Job) -> list[Problem]:
    if job.layout.reduce != "micro-batch":
        return []
    message = "'micro-batch' together with layout.pp: a stage's gradients are reduced once per step"
    return [Problem("layout.reduce", message, "Leave it out.")]


def _either(fixes: list[str]) -> str:
    return ", or ".join(fixes)


# --- split ---------------------------------------------------------------------------------------------


def split(model: Decoder, mesh: Mesh, job: Job) -> list[Decoder]:
    """The stages of this rank in forward order: models with some of the blocks, and with embedding and head
    only where they begin and end. Parameters keep the names they have in the whole model.

    Of a tied model first and last stage have a copy each of the embedding, the last as `head.output.weight`.
    The model's parameters must be on the meta device: blocks move to their stage, the rest is copied.
    """
    if job.layout.pp == 1:
        return [model]
    import copy

    from torch import nn

    blocks, model.blocks = model.blocks, nn.ModuleDict()
    found = []
    cut = stages(job)
    for number in stages_of(job, mesh.position("pp")):
        names = [part.partition(".")[2] for part in cut[number] if part.startswith("blocks.")]
        part = copy.deepcopy(model)
        part.blocks = nn.ModuleDict({name: blocks[name] for name in names})
        if "embedding" not in cut[number]:
            part.embedding = None
        if "head" not in cut[number]:
            part.head = None
        found.append(part)
    return found


# --- account -------------------------------------------------------------------------------------------


def activation_shape(job: Job) -> tuple[int, int, int]:
    """The residual stream of one micro-batch as one rank has it: [micro_batch, sequence, dim]."""
    layout = Layout.of(job)
    assert job.training.micro_batch is not None
    length = job.training.seq_len // layout.cp
    if job.layout.sequence_parallel:
        length //= layout.tp
    return job.training.micro_batch, length, job.spec.dim


def boundary_messages(setup: Setup, side: Literal["before", "after"] = "before") -> list[Message]:
    """What crosses from one stage to the next on another rank and comes back, for one micro-batch.

    side  on which side of the boundary the rank is whose messages these are
    """
    split = setup.tp if setup.sequence_parallel else 1
    payload = setup.tokens // split * setup.spec.dim * setup.precision.compute_bytes
    forward: Operation = "send" if side == "before" else "recv"
    backward: Operation = "recv" if side == "before" else "send"
    return [
        Message(forward, payload, "pp", setup.pp, 1, "forward", "forward"),
        Message(backward, payload, "pp", setup.pp, 1, "backward", "backward"),
    ]


def swap_messages(setup: Setup, payload: Number) -> list[Message]:
    """Once a step: of a tied model, first and last stage on different ranks swap their gradients of it.

    payload  bytes of the embedding's gradient that this rank updates
    """
    swapped = (payload > 0) & setup.piped & (setup.pipeline.shape != "v")
    operations: tuple[Operation, ...] = ("send", "recv")
    return [Message(way, payload, "pp", setup.pp, 1 * swapped, "optimizer") for way in operations]


def account(ledger: Ledger, job: Job, place: Place) -> Ledger:
    """Add what travels between stages, and between the two copies of a tied embedding."""
    if job.layout.pp == 1:
        return ledger
    setup, last = Setup.of(job), stage_count(job) - 1
    for stage in stages_of(job, place.pp):
        if stage > 0 and rank_of(job, stage - 1) != place.pp:
            ledger = ledger.send(*repeated(boundary_messages(setup, "after"), setup.micro_batches))
        if stage < last and rank_of(job, stage + 1) != place.pp:
            ledger = ledger.send(*repeated(boundary_messages(setup, "before"), setup.micro_batches))
    return _account_tied(ledger, job, place)


def _account_tied(ledger: Ledger, job: Job, place: Place) -> Ledger:
    """First and last stage swap what each has of the embedding's gradient."""
    setup, layout = Setup.of(job), Layout.of(job)
    for piece in pieces(job, place):
        if piece.shared:
            payload = shard_count(piece, layout, place) * setup.precision.reduce_bytes
            ledger = ledger.send(*swap_messages(setup, payload))
    return ledger
