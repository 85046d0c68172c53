"""The pipeline axis: ranks hold different layers, and micro-batches flow through them.

A schedule (`schedules/`) says which stages a rank holds and when it computes which micro-batch. Between them
only the residual stream travels: forward its values, backward their gradients.
"""

from typing import Literal

from fivefold.axes.rules import rule
from fivefold.config import Job
from fivefold.ledger.ledger import Message, Operation
from fivefold.ledger.numbers import divisors
from fivefold.ledger.setup import Number, Setup


def _stages_each(setup: Setup) -> Number:
    """Stages that a rank holds under the schedule: a number of its own, or as many as are asked for."""
    return setup.pipeline.stages or setup.virtual_stages


@rule("layout.virtual_stages", lambda setup: (setup.pp == 1) | (setup.virtual_stages == _stages_each(setup)))
def _virtual_stages(setup: Setup) -> tuple[str, str]:
    wanted = _stages_each(setup)
    what = "one stage" if wanted == 1 else f"{wanted} stages"
    message = f"{setup.virtual_stages}, but under '{setup.schedule}' a rank holds {what}"
    others = "interleaved, looped-bfs or zero-bubble"
    return message, f"Use layout.virtual_stages = {wanted}, or layout.schedule = {others}."


@rule(
    "layout.pp",
    # A wrong number of stages on each rank is another rule's.
    lambda setup: (
        (setup.pp == 1) | (setup.virtual_stages != _stages_each(setup)) | (setup.spec.layers >= setup.stages)
    ),
)
def _layers(setup: Setup) -> tuple[str, str]:
    pp, virtual, layers = setup.pp, setup.virtual_stages, setup.spec.layers
    each = f" x {virtual} stages each" if virtual > 1 else ""
    fixes = [f"layout.pp = {layers // virtual}"] if layers >= virtual else []
    if virtual > 1 and setup.pipeline.shape != "v" and layers >= pp:
        fixes.append(f"layout.virtual_stages = {layers // pp}")
    fixes.append(f"model.layers = {setup.stages}")
    message = f"{pp} ranks{each} make {setup.stages} stages, but the model has {layers} layers"
    return message, f"Every stage needs a layer: use {', or '.join(fixes)}."


@rule(
    "training.global_batch",
    lambda setup: (setup.pp == 1) | setup.pipeline.allows(setup.pp, setup.micro_batches),
)
def _micro_batches(setup: Setup) -> tuple[str, str]:
    schedule, pp = setup.pipeline, int(setup.pp)
    count, size = int(setup.micro_batches), int(setup.micro_batch)
    needs, nearest = schedule.needed(pp, count)
    fixes = [f"training.global_batch = {n * size * setup.data_ranks}" for n in nearest]
    share = count * size
    smaller = [n for n in divisors(share) if n < size and schedule.allows(pp, share // n)]
    if smaller:
        fixes.append(f"training.micro_batch = {smaller[-1]}")
    message = f"{count} micro-batches a step, but '{schedule.name}' on {pp} ranks needs {needs}"
    return message, f"Use {', or '.join(fixes)}."


@rule("layout.reduce", lambda setup: setup.reduce != "micro-batch" or setup.pp == 1)
def _reduction(setup: Setup) -> tuple[str, str]:
    message = "'micro-batch' together with layout.pp: a stage's gradients are reduced once per step"
    return message, "Leave it out."


RULES = (_virtual_stages, _layers, _micro_batches, _reduction)


def activation_shape(job: Job) -> tuple[int, int, int]:
    """The residual stream of one micro-batch as one rank has it: [micro_batch, sequence, dim]."""
    setup = Setup.of(job)
    return int(setup.micro_batch), int(setup.seq_len // setup.cp // setup.stream_split), setup.spec.dim


def boundary_messages(setup: Setup, side: Literal["before", "after"] = "before") -> list[Message]:
    """What crosses from a stage to the next and back, one micro-batch, as the rank on that `side` sees it."""
    payload = setup.tokens // setup.stream_split * setup.spec.dim * setup.precision.compute_bytes
    forward: Operation = "send" if side == "before" else "recv"
    backward: Operation = "recv" if side == "before" else "send"
    return [
        Message(forward, payload, "pp", setup.pp, 1, "forward", "forward"),
        Message(backward, payload, "pp", setup.pp, 1, "backward", "backward"),
    ]


def swap_messages(setup: Setup, payload: Number) -> list[Message]:
    """Once a step, first and last stage of a tied model swap `payload` bytes, if they are on two ranks."""
    swapped = (payload > 0) & (setup.pp > 1) & (setup.pipeline.shape != "v")
    operations: tuple[Operation, ...] = ("send", "recv")
    return [Message(way, payload, "pp", setup.pp, 1 * swapped, "optimizer") for way in operations]
