"""How long a step over a slow link should take, by the ledger's messages: bytes at the link's rate.

A message between hosts goes around the ring of its group, as Gloo sends it, and so leaves each host once.
Messages inside a host, and all that is not bytes at a rate, are in the time that a step takes without a limit.
"""

from fivefold.config import Job
from fivefold.ledger.ledger import Ledger, Message, wire_bytes
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
        return groups * wire_bytes("all_reduce", float(message.payload), everyone)
    if message.operation == "all_to_all":
        return groups * members * float(message.payload) * (everyone - members) / everyone
    return groups * float(message.wire_bytes)


def bytes_a_step(job: Job, ranks_a_host: int) -> float:
    """Bytes that leave one host in a step."""
    messages = account(job).messages
    return sum(link_bytes(message, job, ranks_a_host) * float(message.count) for message in messages)


def step_seconds(job: Job, ranks_a_host: int, compute_s: float, bytes_a_second: float) -> float:
    """Of one step whose compute, with the messages inside a host, takes `compute_s`.

    What hides behind a pass goes piece by piece: the first piece is waited for, or the last.
    """
    ledger: Ledger = account(job)
    seconds = 0.0
    for name, share in PASSES.items():
        hidden = [m for m in ledger.messages if m.hides_behind == name]
        sending, pieces = _sending(hidden, job, ranks_a_host, bytes_a_second)
        computing = compute_s * share
        seconds += max(computing, sending) + (min(computing, sending) / pieces if pieces else 0.0)
    waited_for = [m for m in ledger.messages if m.hides_behind not in PASSES]
    return seconds + _sending(waited_for, job, ranks_a_host, bytes_a_second)[0]


def _sending(
    messages: list[Message], job: Job, ranks_a_host: int, bytes_a_second: float
) -> tuple[float, int]:
    """Seconds that they take on the link, and how many of them go over it."""
    sizes = [(link_bytes(message, job, ranks_a_host), int(message.count)) for message in messages]
    seconds = sum(size * count for size, count in sizes) / bytes_a_second
    return seconds, sum(count for size, count in sizes if size)
