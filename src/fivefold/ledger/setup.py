"""A model, a batch and a way to split them: all numbers that the shapes of one rank's tensors are made of.

One `Setup` may stand for many layouts at once: every `Number` of it may be an array, all of one shape, and
then everything computed from it is an array too. What decides which operations there are at all (ZeRO stage,
schedule, recomputation, kind of context parallelism) is the same for all layouts of one setup.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.ledger.precision import BYTES, Precision, moments_in, momentum_in, precision_named
from fivefold.models.spec import ModelSpec
from fivefold.schedules import ALONE, Schedule, schedule_named

if TYPE_CHECKING:
    from fivefold.config import Job

Number = int | npt.NDArray[Any]
"""A count or a size: of one layout, or of each of many."""
Condition = bool | npt.NDArray[Any]
"""What holds or not: for one layout, or for each of many."""
Figure = float | npt.NDArray[Any]
"""A measure (seconds, bytes, FLOPs): of one layout, or of each of many."""


@dataclass(frozen=True)
class Setup:
    """What is trained, and how it is split. Names and meanings are those of the job's own keys.

    micro_batch  sequences that one rank takes at a time
    virtual_stages  stages that a pipeline rank holds; 1 without a pipeline
    schedule, cp_kind  "" where the axis is not used
    outer_lr  None where replicas take no outer steps
    """

    spec: ModelSpec
    seq_len: int
    global_batch: int
    precision: Precision
    micro_batch: Number = 1
    dp_replicate: Number = 1
    dp_shard: Number = 1
    cp: Number = 1
    tp: Number = 1
    pp: Number = 1
    ep: Number = 1
    virtual_stages: Number = 1
    zero: int = 0
    schedule: str = ""
    recompute: str = "none"
    cp_kind: str = ""
    sequence_parallel: bool = True
    reduce: str = "auto"
    bucket_mb: float = 25.0
    tp_overlap: bool = False
    optimizer: str = "adamw"
    momentum: float = 0.0
    states: str = "fp32"
    offload: bool = False
    ema: bool = False
    compile: bool = False
    loss_chunk: int = 0
    fp8: str = "none"
    fp8_first: int = 0
    fp8_last: int = 0
    fp8_head: bool = False
    fp8_small: bool = False
    compress: str = "none"
    compress_on: str = "all"
    error_feedback: bool = True
    local_steps: int = 1
    fragments: int = 1
    outer_delay: int = 0
    outer_lr: float | None = None
    outer_momentum: float = 0.0
    outer_mix: float = 0.0

    @classmethod
    def of(cls, job: Job) -> Setup:
        """The setup of a resolved job."""
        layout, optimizer = job.layout, job.optimizer
        schedule = layout.schedule if layout.pp > 1 else ""
        if None in (layout.dp_replicate, layout.dp_shard, layout.zero, schedule, job.training.micro_batch):
            raise ValueError("the job's layout is still open: call fivefold.config.resolve first")
        sections = (job.training, layout, job.communication)
        keys = {key: value for section in sections for key, value in section if value is not None}
        keys |= {"spec": job.spec, "precision": precision_named(job.training.precision)}
        keys |= {"optimizer": optimizer.name, "momentum": optimizer.momentum or 0.0}
        keys |= {"states": optimizer.states, "offload": optimizer.offload, "ema": optimizer.ema is not None}
        return cls(**{field.name: keys[field.name] for field in fields(cls) if field.name in keys})

    def of_layer(self, layer: int) -> Setup:
        """The setup by which one block computes: those at the model's ends may stay in bfloat16."""
        inside = self.fp8_first <= layer < self.spec.layers - self.fp8_last
        return self if inside or self.fp8 == "none" else replace(self, fp8="none")

    @property
    def outer_steps(self) -> bool:
        """Whether replicas train alone between outer steps."""
        return self.outer_lr is not None

    @property
    def replica(self) -> Setup:
        """The setup within which a step sums gradients: where there are outer steps, one replica's."""
        if not self.outer_steps:
            return self
        share: Any = self.global_batch // self.dp_replicate
        return replace(
            self, dp_replicate=1, global_batch=share, outer_lr=None, compress="none", compress_on="all"
        )

    @property
    def ranks(self) -> Number:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> Number:
        """How many ways the batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def micro_batches(self) -> Number:
        """How many micro-batches a rank takes in one optimizer step."""
        return self.global_batch // (self.micro_batch * self.data_ranks)

    @property
    def shard_ranks(self) -> Number:
        """How many ranks share one copy of the model's state under ZeRO 1 to 3."""
        return self.dp_shard * self.cp

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch in one cp rank's layers; norms see what `stream_split` leaves of them."""
        return self.micro_batch * self.seq_len // self.cp

    @property
    def stream_split(self) -> Number:
        """How many ranks share the residual stream between layers."""
        return self.tp if self.sequence_parallel else 1

    @property
    def loss_chunks(self) -> list[tuple[Number, Number]]:
        """Tokens whose logits the loss has at a time, and how often: whole chunks, and one of the rest."""
        if not self.loss_chunk:
            return [(self.tokens, 1)]
        rest = self.tokens % self.loss_chunk
        return [(self.loss_chunk, self.tokens // self.loss_chunk), (rest, 1 * (rest > 0))]

    @property
    def stages(self) -> Number:
        return self.pp * self.virtual_stages

    @property
    def pipeline(self) -> Schedule:
        """The schedule of the pipeline."""
        return schedule_named(self.schedule) if self.schedule else ALONE

    @property
    def can_split_backward(self) -> bool:
        """Whether gradients of inputs and of weights can be computed at different times.

        With recomputation each half would compute forward again, and a compiled block has one backward.
        """
        return self.recompute == "none" and not self.compile

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule cuts backward in two, and it really is cut."""
        return self.pipeline.splits_backward and self.can_split_backward

    @property
    def recomputes_layers(self) -> bool:
        """Whether whole layers are run forward again in backward, their messages included."""
        return segment_length(self.recompute, 1) is not None

    @property
    def frees_weights(self) -> bool:
        """Whether FSDP frees gathered weights after each use.

        Under a schedule that cuts backward in two they stay from a stage's first forward to its last
        backward: torch looks for them between the two halves, and had FSDP freed them after a forward,
        gradients would silently be wrong.
        """
        return self.zero == 3 and not self.pipeline.splits_backward

    @property
    def gathers_in_8_bits(self) -> bool:
        """Whether ZeRO gathers weights that are multiplied in 8 bits in these.

        Each rank casts its shard: the scale of the whole weight is known. Those of rows and columns are not.
        """
        return self.fp8 == "tensorwise" and self.zero > 0

    @property
    def reduces_every_micro_batch(self) -> Condition:
        """Whether gradients are reduce-scattered after each micro-batch rather than once per step.

        The micro-batches of a pipeline overlap: there a stage reduces after its last one.
        """
        return (self.pp == 1) & (self.zero >= 2 and self.reduce != "step")

    @property
    def may_keep_gradients_narrow(self) -> Condition:
        """Whether a gradient stays in the 16 bits in which backward makes it, where nothing is added to it.

        No micro-batch adds to the only one's, and AdamW reads them as they are. FSDP reduces in float32, and
        fp16's gradients are divided by the loss scale, in float32 too: in their own 16 bits small ones would
        be lost.
        """
        reads = self.optimizer == "adamw" and self.precision.compute == "bfloat16"
        return (self.micro_batches == 1) & (reads and self.zero == 0)

    @property
    def runs_like_zero_1(self) -> bool:
        """Whether this stage of ZeRO, 2 or 3, is the same program as stage 1.

        In a pipeline gradients are reduced once a step, as under stage 1; and where weights stay gathered,
        stage 3 has no more to free.
        """
        return bool(self.schedule) and self.zero >= 2 and not self.frees_weights

    @property
    def compresses_shards(self) -> bool:
        """Whether FSDP's reduce-scatters travel compressed."""
        return self.zero > 0 and self.compress != "none" and self.compress_on == "all"

    @property
    def compresses_replicas(self) -> bool:
        """Whether sums of FSDP's shards over replicas (HSDP) travel compressed, where there are any."""
        return self.zero > 0 and self.compress != "none"

    @property
    def kv_heads(self) -> Number:
        """Key and value heads that one tp rank computes with: its share, or all where they do not divide."""
        held: Any = np.where(self.spec.kv_heads % self.tp == 0, self.spec.kv_heads // self.tp, 1)
        return held if isinstance(self.tp, np.ndarray) else int(held)

    def master_bytes(self, shard: Number) -> Number:
        """Bytes of master weights where they are a copy of their own; `shard` elements, padding included."""
        return shard * self.precision.master_bytes if self.zero or self.precision.mixed else 0 * shard

    def moment_bytes(self, elements: Number, matrices: Number = 0) -> Number:
        """Bytes of what the optimizer keeps for `elements` weights: moments, momentum, averaged weights.

        matrices  so many of them are Muon's, in jobs that have it: it keeps one number where AdamW keeps two
        """
        averages = elements * self.ema * self.precision.master_bytes
        if self.optimizer == "sgd":
            return elements * self.momentum_bytes + averages
        pair = 2 * BYTES[moments_in(self.states, self.precision)]
        if self.optimizer == "muon":
            return (elements - matrices) * pair + matrices * self.momentum_bytes + averages
        return elements * pair + averages

    @property
    def momentum_bytes(self) -> int:
        """Bytes of one number's momentum, under SGD and Muon."""
        return BYTES[momentum_in(self.states, self.precision)] if self.momentum else 0

    def outer_bytes(self, elements: Number) -> Number:
        """Bytes of what outer steps keep for `elements` weights: the outer weights, their momentum, and for
        averages on their way the sums and the weights they were started from."""
        if not self.outer_steps:
            return 0 * elements
        travelling = -(-self.outer_delay * self.fragments // self.local_steps)  # fragments at a time
        kept = elements * (1 + (self.outer_momentum > 0)) + -(-2 * travelling * elements // self.fragments)
        return kept * self.precision.master_bytes

    def counter_bytes(self, tensors: Number, matrices: Number = 0) -> Number:
        """Bytes of step counters: AdamW has one for each parameter, a float32 scalar. Muon has one for its
        `matrices` where momentum is rounded.
        """
        if self.optimizer == "muon" and (self.states == "fp32" or not self.momentum):
            return 4 * (tensors - matrices)
        return 4 * tensors if self.optimizer != "sgd" else 0 * tensors


def segment_length(mode: str, layers: int) -> int | None:
    """How many layers a recompute setting runs forward again at a time; None when not whole layers."""
    if mode == "full":
        return 1
    if mode == "sqrt":
        return max(1, round(math.sqrt(layers)))
    if mode.startswith("every-"):
        return min(int(mode.removeprefix("every-")), layers)
    return None
