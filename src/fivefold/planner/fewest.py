"""How few devices make a deadline."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.numbers import divisors
from fivefold.planner.answer import Answer

MOST_SERVERS = 2**14
STEPS = 16


def counts(server: int) -> list[int]:
    """Device counts worth asking for: one to all of a server, then servers in numbers that split well."""
    powers = [2**exponent for exponent in range(MOST_SERVERS.bit_length())]
    servers = {power * odd for power in powers for odd in (1, 3, 5) if power * odd <= MOST_SERVERS}
    return sorted({*divisors(server), *(server * count for count in servers)})


def steps_between(few: int, many: int, server: int) -> list[int]:
    """Whole servers between two numbers of devices, not more than `STEPS` of them."""
    step = server * max(1, (many - few) // server // STEPS)
    return list(range(few // server * server + step, many, step))


def fewest(
    cluster: Cluster, answer_for: Callable[[int], Answer], in_time: Callable[[Answer], bool]
) -> Answer:
    """The answer with the fewest devices that is in time; the largest tried where none is.

    More devices take less time, or the same, but for numbers that split badly: so halving the range finds the
    first that does, and halving what lies below it some whole servers less.
    """
    answered = cache(answer_for)
    possible = [count for count in counts(cluster.server) if cluster.has(count)]

    def makes_it(gpus: int) -> bool:
        return in_time(answered(gpus))

    place = bisect_left(possible, True, key=makes_it)
    gpus = possible[min(place, len(possible) - 1)]
    if 0 < place < len(possible):
        nearer = [*steps_between(possible[place - 1], gpus, cluster.server), gpus]
        gpus = nearer[bisect_left(nearer, True, hi=len(nearer) - 1, key=makes_it)]
    return answered(gpus)
