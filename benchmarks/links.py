"""The link of a host: how fast it may be, and the bytes that went through it."""

import re
import threading
import time
from collections.abc import Sequence
from operator import sub
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from fivefold.problems import BadInput, Problem

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PAYLOAD = 1448 / 1514
"""The part of an Ethernet frame of full length that TCP fills with data."""
SAMPLE_S = 0.01
Sample = tuple[float, list[int]]
"""A time, as `time.time` has it, and how many bytes each host had sent by then."""


def bytes_per_second(rate: str) -> float:
    """What a rate such as `100mbit` carries, headers included. Raises `BadInput`."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(UNITS)})", rate)
    if found is None or float(found[1]) == 0:
        hint = f"Write a number above 0 and one of {', '.join(UNITS)} (bits a second): 100mbit."
        raise BadInput([Problem("--rate", f"'{rate}' is not a rate", hint)])
    return float(found[1]) * UNITS[found[2]] / 8


class Linked(Protocol):
    """A host, as far as its link is concerned."""

    def sent(self) -> int:
        """Bytes that went out so far."""


class Traffic:
    """What hosts send while the block runs, sampled every `SAMPLE_S` seconds; all by host, in their order."""

    def __init__(self, hosts: Sequence[Linked]):
        self._hosts = hosts
        self._samples: list[Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._take()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._take()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._take()

    def _take(self) -> None:
        self._samples.append((time.time(), [host.sent() for host in self._hosts]))

    @property
    def sent(self) -> list[int]:
        """Bytes that each host has sent."""
        (_, first), (_, last) = self._samples[0], self._samples[-1]
        return list(map(sub, last, first))

    def peak(self, window_s: float, until: float) -> float:
        """The most bytes a second that a host sent over any time as long as this, before `until`."""
        return fullest([sample for sample in self._samples if sample[0] <= until], window_s)


def fullest(samples: Sequence[Sample], window_s: float) -> float:
    """The most bytes a second of any host in a window as long as this, or as the way to the next sample."""
    most, begin = 0.0, 0
    for place, (now, sent) in enumerate(samples):
        while begin + 1 < place and now - samples[begin][0] > window_s:
            begin += 1
        then, before = samples[begin]
        most = max(most, max(map(sub, sent, before)) / max(window_s, now - then))
    return most


def received(device: str, table: Path) -> int:
    """Bytes that came in by a network device, by the kernel's table (`/proc/net/dev`) of its namespace."""
    for line in table.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[0])
    raise ValueError(f"{table} has no {device}")
