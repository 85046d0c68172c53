"""Outer steps: replicas train alone for `local_steps` steps, then move together (local SGD, DiLoCo).

A replica is all ranks with one place along `dp_replicate`. Between outer steps it is a run of its own, on its
share of the batch: nothing that a step sends leaves it. In an outer step ranks that hold the same weights in
different replicas average how far they have come. `training/outer_step.py` does what is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from fivefold.axes.layout import EVERYONE, Layout, Place, name_in
from fivefold.axes.pieces import PartSize, Piece, pieces, size_of
from fivefold.axes.rules import rule
from fivefold.comm.payloads import compressed_bytes, fill_buckets
from fivefold.config import Job, local_steps
from fivefold.ledger.ledger import Message
from fivefold.ledger.setup import Figure, Number, Setup
from fivefold.models.inventory import parameters
from fivefold.models.spec import ModelSpec
from fivefold.problems import either

STEPS = "steps"
"""What averages hide behind that are on their way while steps go on."""
FIGURES = 3
"""Numbers that replicas tell each other beside the average; and how long each has waited."""


@rule("communication.local_steps", lambda setup: not setup.outer_steps or setup.dp_replicate > 1)
def _alone(setup: Setup) -> tuple[str, str]:
    key = f"local_steps = {setup.local_steps}" if setup.local_steps > 1 else f"outer_lr = {setup.outer_lr}"
    hint = "Set layout.dp_replicate to the number of replicas, 2 or more, or leave the outer steps out."
    return f"{key} with one replica: layout.dp_replicate = 1, so there is nothing to average", hint


@rule(
    "communication.fragments",
    lambda setup: not setup.outer_steps or setup.local_steps % setup.fragments == 0,
)
def _fragments(setup: Setup) -> tuple[str, str]:
    each, count = setup.local_steps, setup.fragments
    fitting = [n for n in range(1, each + 1) if each % n == 0]
    near = [n for n in fitting if n < count][-1:] + [n for n in fitting if n > count][:1]
    hint = f"Use communication.fragments = {either(near)}, or communication.local_steps = "
    hint += either([n for n in (each // count * count, (each // count + 1) * count) if n])
    return f"{count} does not divide communication.local_steps = {each}: turns would be uneven", f"{hint}."


@rule(
    "communication.outer_delay",
    lambda setup: not setup.outer_steps or setup.local_steps == 1 or setup.outer_delay <= setup.local_steps,
)
def _delay(setup: Setup) -> tuple[str, str]:
    each, delay = setup.local_steps, setup.outer_delay
    message = f"{delay} is longer than a round of communication.local_steps = {each}"
    hint = f"Use at most {each}, or communication.local_steps = {delay}; at 1 any delay is allowed."
    return message, hint


@rule(
    "communication.outer_mix",
    lambda setup: not setup.outer_steps or setup.outer_mix == 0 or setup.outer_delay <= setup.local_steps,
)
def _mix(setup: Setup) -> tuple[str, str]:
    message = f"{setup.outer_mix} where averages overtake each other: communication.outer_delay = "
    hint = f"Use communication.outer_mix = 0, or communication.outer_delay = {setup.local_steps} or less."
    return message + f"{setup.outer_delay} with communication.local_steps = {setup.local_steps}", hint


RULES = (_alone, _fragments, _delay, _mix)


def replica_of(job: Job) -> Job:
    """One replica of a resolved job with outer steps, as a job of its own."""
    assert job.layout.dp_replicate is not None
    share = job.training.global_batch // job.layout.dp_replicate
    plain = local_steps.without(job.communication)
    return job.model_copy(
        update={
            "layout": job.layout.model_copy(update={"dp_replicate": 1}),
            "training": job.training.model_copy(update={"global_batch": share}),
            # Gradients stay inside: it is the outer difference that is compressed.
            "communication": plain.model_copy(update={"compress": "none", "compress_on": "all"}),
        }
    )


@lru_cache(maxsize=64)
def fragment_of(spec: ModelSpec, fragments: int) -> dict[str, int]:
    """By parameter, which fragment it is in: a function of the model alone, whoever holds it.

    The largest first, each goes to the fragment with the least so far. So alike matrices of neighbouring
    blocks are in different fragments, and fragments are about as large as each other.
    """
    sizes, found = [0] * fragments, dict[str, int]()
    for parameter in sorted(parameters(spec), key=lambda parameter: -parameter.count):
        found[parameter.name] = lightest = sizes.index(min(sizes))
        sizes[lightest] += parameter.count
    return found


def outer_buckets(setup: Setup, mine: Sequence[Piece], sizes: Sequence[int]) -> list[list[list[int]]]:
    """By fragment, which of a rank's pieces travel together: buckets of indices into `mine`.

    sizes  elements that this rank keeps of each piece
    What two stages share goes by itself: alike messages are added up alike, so the copies stay the same.
    """
    where, limit = fragment_of(setup.spec, setup.fragments), int(setup.bucket_mb * 2**20)
    found: list[list[list[int]]] = []
    for fragment in range(setup.fragments):
        held = [i for i, piece in enumerate(mine) if where[piece.name] == fragment and sizes[i]]
        usual = [index for index in held if not mine[index].shared]
        filled = fill_buckets([sizes[index] * setup.precision.master_bytes for index in usual], limit)
        apart = [[index] for index in held if mine[index].shared]
        found.append([[usual[index] for index in bucket] for bucket in filled] + apart)
    return found


def outer_messages(job: Job, place: Place) -> Iterator[Message]:
    """What the rank at `place` sends for outer steps: of each fragment once in `local_steps` steps."""
    setup, layout, mine = Setup.of(job), Layout.of(job), pieces(job, place)
    sizes = [int(size_of([piece], layout, place).updated) for piece in mine]
    for buckets in outer_buckets(setup, mine, sizes):
        for bucket in buckets:
            yield from _average(setup, sum(sizes[index] for index in bucket))
    for message in told_messages(setup):
        yield replace(message, group=name_in(layout.replica, message.group))


def part_messages(setup: Setup, size: PartSize) -> Iterator[Message]:
    """As `outer_messages`, of one part of the model, of one layout or of many: its bytes in one message."""
    if setup.outer_steps:
        yield from _average(setup, size.updated)


def told_messages(setup: Setup) -> Iterator[Message]:
    """What ranks tell each other with each average, in their replica and then between replicas."""
    if setup.outer_steps:
        often = setup.fragments / setup.local_steps
        yield Message("all_reduce", 8, EVERYONE, setup.replica.ranks, often, "optimizer")
        payload = 8 * (FIGURES + setup.dp_replicate)
        yield Message(
            "all_reduce", payload, "dp_replicate", setup.dp_replicate, often, "optimizer", _behind(setup)
        )


def hidden_share(setup: Setup) -> float:
    """The part of all steps in which averages may be on their way: those that take longer are waited for."""
    return min(1.0, setup.outer_delay * setup.fragments / setup.local_steps)


def _average(setup: Setup, elements: Number) -> Iterator[Message]:
    """One sum over replicas of so many numbers, once in a round."""
    often: Figure = (elements > 0) / setup.local_steps
    whole = elements * setup.precision.master_bytes
    total = Message(
        "all_reduce", whole, "dp_replicate", setup.dp_replicate, often, "optimizer", _behind(setup)
    )
    if setup.compress == "none":
        yield total
    else:
        payload = compressed_bytes(elements, setup.dp_replicate, setup.compress)
        yield replace(total, operation="all_to_all", payload=payload)
        yield replace(total, operation="all_gather", payload=payload)


def _behind(setup: Setup) -> str | None:
    return STEPS if setup.outer_delay else None
