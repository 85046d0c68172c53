"""The texts' worked examples of data parallelism alone: what it sends against what it computes.

Every device holds the whole model and computes on its share of the batch; once a step the gradients are
summed over all devices. What is sent depends on the model alone, what is computed on the batch too: so their
ratio falls with the tokens of a device, and rises with the devices that share a batch.

The texts give models, devices and links. What they leave open is said in `Case` and printed with the result.
"""

from dataclasses import dataclass

from fivefold.config import Job, resolve
from fivefold.hardware.cluster import Cluster, Level, find_cluster
from fivefold.hardware.devices import GIBI
from fivefold.ledger.ledger import Message
from fivefold.models.flops import flops_per_token
from fivefold.models.inventory import parameter_count
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.planner.scaling import gpu_hours
from fivefold.planner.time.collectives import message_time
from fivefold.replay.account import account

MFU = 0.4
"""Share of the dense 16-bit peak; what `fivefold scaling` assumes too."""
GRADIENT = 2
"""Bytes: the texts keep gradients in 16 bits. (fivefold adds them up in 32, and sends twice as much.)"""


def gradients(payload: float, devices: int) -> Message:
    """The message of a step: all gradients, summed over all devices."""
    return Message("all_reduce", int(payload), "dp_replicate", devices, 1, "backward")


@dataclass(frozen=True)
class AllReduce:
    """The texts' own example: that many bytes over that many devices, at bytes/s each way."""

    payload: float = 14e9
    devices: int = 8
    bandwidth: float = 50e9
    computation: float = 2.0

    @property
    def sent(self) -> float:
        """Bytes that each device sends, by a ring."""
        return float(gradients(self.payload, self.devices).wire_bytes)

    @property
    def seconds(self) -> float:
        return self.sent / self.bandwidth

    @property
    def efficiency(self) -> float:
        """Of a step that computes first and sends then."""
        return self.computation / (self.computation + self.seconds)


@dataclass(frozen=True)
class Case:
    """A model on a cluster.

    batch     tokens of a step
    batch_of  who trained with such a batch
    """

    name: str
    model: str
    cluster: str
    devices: int
    batch: int
    batch_of: str


CASES = (
    # Batches: Llama 2 (arXiv:2307.09288) section 2.2, Llama 3 (arXiv:2407.21783) section 3.4.1.
    Case("7B on 8 A100s", "llama2-7b", "dgx-a100", 8, 2**22, "Llama 2"),
    Case("70B on 64 H100s", "llama2-70b", "dgx-h100", 64, 2**22, "Llama 2"),
    Case("1T on 4,096 H100s", "megatron-1t", "dgx-h100", 4096, 2**24, "Llama 3 at its end"),
)


@dataclass(frozen=True)
class Ratio:
    """What a case sends against what it computes, nothing hidden behind anything.

    parameters     of the model
    tokens         of each device in a step
    sent           bytes that each device sends, by a ring
    link           the slowest that the ring crosses: one link to each unit below it, as the texts count
    communication  seconds at that link
    planned        seconds as `fivefold plan` has it: a link to each device, all used at once, at NCCL's rates
    computation    seconds of a device's tokens, at `MFU` of its peak
    held           bytes of weights, gradients and optimizer states on each device
    """

    case: Case
    parameters: int
    tokens: float
    sent: float
    link: Level
    communication: float
    planned: float
    computation: float
    held: int

    @property
    def ratio(self) -> float:
        return self.communication / self.computation

    @property
    def planned_ratio(self) -> float:
        return self.planned / self.computation

    @property
    def even_tokens(self) -> float:
        """Tokens a device with which sending takes as long as computing."""
        return self.tokens * self.ratio

    @property
    def even_batch(self) -> float:
        return self.even_tokens * self.case.devices

    @property
    def servers(self) -> int:
        return -(-self.case.devices // cluster_of(self.case).server)

    @property
    def memory(self) -> float:
        """Bytes that a device has."""
        return cluster_of(self.case).device.memory_gib * GIBI

    @property
    def fits(self) -> bool:
        """Whether a device can hold it, before any activation."""
        return self.held <= self.memory

    @property
    def largest(self) -> float:
        """Parameters of the largest model of which a device could hold as many bytes a parameter."""
        return self.memory / (self.held / self.parameters)


def cluster_of(case: Case) -> Cluster:
    return find_cluster(case.cluster)


def ratio(case: Case) -> Ratio:
    """One case, by the functions that plan."""
    spec, cluster = PRESETS[case.model], cluster_of(case)
    count = parameter_count(spec)
    message = gradients(GRADIENT * count, case.devices)
    link = cluster.levels[0] if case.devices <= cluster.server else cluster.levels[1]
    tokens = case.batch / case.devices
    operations = tokens * flops_per_token(spec, spec.max_seq_len).model
    planned = message_time(cluster, "all_reduce", message.payload, case.devices, 1)
    return Ratio(
        case,
        count,
        tokens,
        float(message.wire_bytes),
        link,
        float(message.wire_bytes) / link.bandwidth,
        float(planned),
        3600 * gpu_hours(operations, cluster.device, MFU),
        _held(case, spec),
    )


def _held(case: Case, spec: ModelSpec) -> int:
    """Bytes of such a job on each device, by the ledger, when weights, gradients and states are all there."""
    job = Job.model_validate(
        {
            "model": {"preset": case.model},
            "layout": {"dp_replicate": case.devices, "zero": 0},
            "training": {
                "seq_len": spec.max_seq_len,
                "global_batch": case.batch // spec.max_seq_len,
                "micro_batch": 1,
                "precision": "bf16",
            },
            "data": {"source": "random"},
        }
    )
    ledger = account(resolve(job, case.devices, device="cuda"))
    return sum(line.rest for line in ledger.held)
