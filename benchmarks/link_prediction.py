"""How long a step over a slow link should take, by the ledger's messages: bytes at the link's rate.

A message between hosts goes around the ring of its group, as Gloo sends it, and so leaves each host once.
What stays inside a host, and all that is not bytes at a rate, is in the time of a step without a limit.
"""

from collections.abc import Iterable

from fivefold.axes.outer import STEPS, hidden_share
from fivefold.config import Job
from fivefold.ledger.ledger import Message, wire_bytes
from fivefold.ledger.setup import Setup
from fivefold.planner.time.collectives import strides
from fivefold.replay.account import account

PASSES = {"forward": 1 / 3, "backward": 2 / 3}
"""The parts of a step's compute, by their FLOPs."""


def link_bytes(message: Message, job: Job, ranks_a_host: int) -> float:
    """Bytes that leave one host for one such message of all its ranks."""
    stride = int(strides(Setup.of(job))[message.group])
    members, everyone = min(int(message.ranks), max(1, ranks_a_host // stride)), int(message.ranks)
    if members == everyone:
        return 0.0
    groups = ranks_a_host / members
    if message.operation == "reduce_scatter":
        # FSDP's own goes through torch's Gloo: all ranks sum everything, and each keeps its part.
        return groups * float(wire_bytes("all_reduce", float(message.payload), everyone))
    if message.operation == "all_to_all":
        return groups * members * float(message.payload) * (everyone - members) / everyone
    return groups * float(message.wire_bytes)


def bytes_a_step(job: Job, ranks_a_host: int) -> float:
    """Bytes that leave one host in a step."""
    return _bytes(account(job).messages, job, ranks_a_host)


def step_seconds(job: Job, ranks_a_host: int, compute_s: float, bytes_a_second: float) -> float:
    """Of one step whose compute, with the messages inside a host, takes `compute_s`.

    What hides behind a pass goes piece by piece: the first piece is waited for, or the last. What hides
    behind the steps after it is waited for when those are done.
    """

    def sending(behind: str | None) -> float:
        found = [message for message in messages if message.hides_behind == behind]
        return _bytes(found, job, ranks_a_host) / bytes_a_second

    messages = [m for m in account(job).messages if link_bytes(m, job, ranks_a_host)]
    seconds = sending(None)
    for name, share in PASSES.items():
        pieces = sum(float(m.count) for m in messages if m.hides_behind == name)
        computing, behind = compute_s * share, sending(name)
        seconds += max(computing, behind) + (min(computing, behind) / pieces if pieces else 0.0)
    return seconds + max(0.0, sending(STEPS) - hidden_share(Setup.of(job)) * compute_s)


def _bytes(messages: Iterable[Message], job: Job, ranks_a_host: int) -> float:
    """Bytes that leave one host for all of them."""
    return sum(link_bytes(message, job, ranks_a_host) * float(message.count) for message in messages)
