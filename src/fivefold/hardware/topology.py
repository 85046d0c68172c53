"""A cluster: one kind of device, in levels of links from the server outwards, and what was measured of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold.hardware.devices import Device
from fivefold.problems import Problem

UNLIMITED = 2**62
"""`devices` of an outermost level that takes as many as one has."""

Rates = tuple[tuple[float, float], ...]
"""(FLOPs of one call, FLOP/s) of several sizes, smallest first."""
Times = tuple[tuple[float, float], ...]
"""(payload in bytes, seconds) of several messages, smallest first."""

TALL = 16
"""How many times longer than the others the long side of a tall matrix product is, where it is measured."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
"""What is sent, by the ledger's names; a message that is received takes as long as the one sent."""


@dataclass(frozen=True)
class Level:
    """The devices that one kind of link joins: a server, a rack, a pod.

    devices           how many devices one unit of this level holds
    bandwidth         bytes/s, each way, that ONE device can send through it
    latency           seconds of one hop
    oversubscription  how many times what the switches carry the devices could send together; 1 is enough
    reduces           its switches can add up (NVLink SHARP), so that an all-reduce needs no ring
    """

    name: str
    devices: int
    bandwidth: float
    latency: float
    oversubscription: float = 1.0
    reduces: bool = False


@dataclass(frozen=True)
class Measured:
    """What `fivefold probe` found, all ranks measuring at once: rates and times of ONE rank.

    matmul            dtype -> rates of square matrix products
    tall              dtype -> rates of products [TALL x n, n] x [n, n], as small models have them
    attention         dtype -> FLOP/s of causal attention, by the ledger's count: two products forward and
                      five backward, of half the square
    memory_bandwidth  bytes/s, read and written, of a sum of two large tensors
    launch            seconds that an operation on tiny tensors takes, forward and backward through autograd
    collectives       operation -> how many ranks -> (payload, seconds) of several sizes: a table, for one
                      latency and one bandwidth cannot follow the bends that caches make
    sharded           seconds that a message of FSDP takes longer than that, where the device is the host
    """

    matmul: Mapping[str, Rates]
    attention: Mapping[str, float]
    memory_bandwidth: float
    launch: float
    collectives: Mapping[str, Mapping[int, Times]] = field(default_factory=dict)
    tall: Mapping[str, Rates] = field(default_factory=dict)
    sharded: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, and the links between them, innermost first.

    price  $ for one device for one hour; None where it was not given
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    price: float | None = None
    measured: Measured | None = None

    @property
    def devices(self) -> int | None:
        """How many devices there are; None for as many as one has."""
        held = self.levels[-1].devices
        return None if held >= UNLIMITED else held

    def has(self, count: int) -> bool:
        """Whether the cluster has this number of devices."""
        return self.devices is None or count <= self.devices

    def problems(self, count: int, option: str) -> list[Problem]:
        """Why a job cannot have this number of devices; empty when it can."""
        if self.has(count):
            return []
        hint = f"Allowed: at most {self.devices:,}. Of a larger cluster, write its links into a file."
        return [Problem(option, f"{count:,} devices, but {self.name} has {self.devices:,}", hint)]

    @property
    def server(self) -> int:
        """How many devices the fastest links join."""
        return self.levels[0].devices
