"""Ranks that torchrun or srun started find each other: all of them come, or it is said who has not.

Each leaves its name in a store that rank 0, or torchrun's agent, serves; the last one opens the door.
"""

import socket
import sys
import time

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

from fivefold.problems import BadNews

SAY_S, LOOK_S = 10.0, 0.5
"""How often is said who is missing, and looked whether it is."""
NAMED = 8
KEY = "resilience.join_s"


def meet(rank: int, ranks: int, address: tuple[str, int], prefix: str, serving: bool, join_s: float) -> Store:
    """The store in which all ranks have met. Raises `BadNews` when some have not come in `join_s` seconds.

    Whom it waits for is said on stderr every `SAY_S` seconds.

    serving  whether this rank serves the store
    """
    ends = time.monotonic() + join_s
    at = f"{address[0]}:{address[1]}"
    store = PrefixStore(prefix, _opened(rank, ranks, address, serving, ends))
    store.set(_name(rank), "")
    if store.add("came", 1) >= ranks:
        store.set("all", "")
    said = time.monotonic()
    while not _all_came(store):
        time.sleep(LOOK_S)
        now = time.monotonic()
        if now < ends and now - said < SAY_S:
            continue
        missing, said = _missing(store, ranks), now
        speaks = all(other in missing for other in range(rank))  # the first of those that are there
        if now >= ends and missing and speaks:
            store.set("over", "")
            time.sleep(3 * LOOK_S)  # the others leave first, without a word
            raise BadNews(f"{_listed(missing)} of {ranks} did not come to {at} within {join_s:.0f} s ({KEY})")
        if speaks:
            _say(f"waiting for {len(missing)} of {ranks} ranks at {at}: {_listed(missing)}")
    return store


def _opened(rank: int, ranks: int, address: tuple[str, int], serving: bool, ends: float) -> Store:
    """The store, as soon as somebody serves it."""
    at = f"{address[0]}:{address[1]}"
    said = time.monotonic()
    while not serving and not _answers(address):  # torch's own attempts fill the terminal
        now = time.monotonic()
        if now > ends:
            raise BadNews(f"rank {rank} found nobody at {at}, where rank 0 of {ranks} should be ({KEY})")
        if now - said >= SAY_S:
            said = now
            _say(f"waiting for 1 of {ranks} ranks at {at}: rank 0, where all meet (says rank {rank})")
    try:
        return TCPStore(*address, ranks, is_master=serving, wait_for_workers=False)
    except (DistNetworkError, DistStoreError) as error:
        raise BadNews(f"ranks cannot meet at {at}: {str(error).splitlines()[0]}") from None


def _answers(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=LOOK_S):
            return True
    except OSError:
        time.sleep(LOOK_S)
        return False


def _all_came(store: Store) -> bool:
    try:
        if store.check(["over"]):
            raise SystemExit(1)
        return bool(store.check(["all"]))
    except DistNetworkError:
        raise BadNews("the ranks lost the store in which they meet: rank 0 left") from None


def _missing(store: Store, ranks: int) -> list[int]:
    return [rank for rank in range(ranks) if not store.check([_name(rank)])]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _name(rank: int) -> str:
    return f"here-{rank}"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:NAMED]))
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
