"""The sections of a job and their keys: names, defaults, ranges, and one line on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fivefold.config.complain import problems_in
from fivefold.config.keys import Key, Keys
from fivefold.config.schedule_name import ScheduleName
from fivefold.models.huggingface import read_config, unheeded
from fivefold.models.own.reference import reference_of
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput, Problem, did_you_mean, refuse

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]

REQUIRED = {name for name, field in ModelSpec.model_fields.items() if field.is_required()}
"""The fields that describe a model by themselves."""


class Section(BaseModel):
    """A table of the job file: unknown keys are refused, values are never coerced between kinds."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )


class DataSource(Section):
    """One entry of a weighted mix."""

    path: str = Field(description="a name (stdlib, random) or a path, folder or glob")
    weight: Annotated[float, Field(gt=0)] = 1.0


class Data(Section):
    source: str | Annotated[list[str | DataSource], Field(min_length=1)] = Field(
        default="stdlib",
        description="stdlib, random, a file, folder or glob (.txt .jsonl .parquet ...), or a list",
    )
    tokenizer: str = Field(
        default="bytes",
        description="bytes, a path to tokenizer.json, or bpe-N (trained on the source, N tokens)",
    )
    separate_documents: bool = Field(default=True, description="tokens attend only inside their own document")
    text_field: str = Field(
        default="text", description="which field of a JSONL object or Parquet row holds the text"
    )
    heldout: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        default=0.02, description="fraction of the documents kept for validation"
    )
    cache: str | None = Field(
        default=None,
        description="folder of tokenised data (default: fivefold in XDG_CACHE_HOME, or in ~/.cache)",
    )
    workers: Positive | None = Field(
        default=None, description="processes that tokenise (default: one per core)"
    )


class Training(Section):
    steps: Positive = Field(default=200, description="optimizer steps")
    global_batch: Positive = Field(default=32, description="sequences in one optimizer step, over all ranks")
    micro_batch: Positive | None = Field(
        default=None,
        description="sequences one rank takes at a time (default: all; under pp such that each stage gets 4)",
    )
    seq_len: Positive = Field(default=256, description="tokens in a sequence")
    precision: Literal["bf16", "fp16", "fp32", "fp64"] | None = Field(
        default=None,
        description="what the model computes in (default: bf16 on a GPU and with fp8, else fp32)",
    )
    fp8: Literal["none", "tensorwise", "rowwise"] = Field(
        default="none",
        description="linear layers compute in 8 bits, with one scale for each tensor, or for each row "
        "(docs/fp8.md); precision is then bf16",
    )
    fp8_first: Count = Field(default=0, description="blocks at the model's beginning that stay in bf16")
    fp8_last: Count = Field(default=0, description="blocks at the model's end that stay in bf16")
    fp8_head: bool = Field(default=False, description="the output projection computes in 8 bits, too")
    fp8_small: bool = Field(
        default=False, description="layers take part that are too small to gain speed by it, too"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="of initial weights and sample order"
    )
    recompute: str = Field(
        default="none",
        description="activations made again in backward: none, full, every-C, sqrt or selective",
    )
    balance: Literal["loss", "bias", "none"] | None = Field(
        default=None,
        description="how experts are kept evenly used: a term of the loss (default for expert models), "
        "a bias on the router's choice, or not at all",
    )
    balance_weight: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="weight of the balancing term of the loss (default: 0.01)"
    )
    balance_rate: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="how far a step moves a balancing bias (default: 0.001)"
    )
    routing: Literal["learned", "balanced"] | None = Field(
        default=None,
        description="learned (default), or balanced: tokens dealt to experts in turn, for measurements",
    )
    compile: bool = Field(default=False, description="torch.compile each block")
    loss_chunk: Count = Field(
        default=0, description="tokens of a rank's micro-batch whose logits the loss has at a time; 0: all"
    )
    deterministic: bool = Field(
        default=False, description="kernels that give the same bits every time, where torch has them; slower"
    )
    validate_every: Count = Field(default=0, description="steps between validations; 0 is never")
    validate_batches: Positive = Field(default=8, description="global batches in one validation")
    clip: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="largest gradient norm; 0 is no clipping"
    )
    loss_scale: Annotated[float, Field(gt=0)] = Field(
        default=65536.0, description="first loss scale, fp16 only"
    )

    def usual_precision(self, device: str) -> str:
        """What `precision` is where it is left open."""
        return "bf16" if device == "cuda" or self.fp8 != "none" else "fp32"

    @field_validator("recompute")
    @classmethod
    def _known_recompute(cls, value: str) -> str:
        if value in ("none", "full", "sqrt", "selective"):
            return value
        every, _, count = value.partition("-")
        if every == "every" and count.isdecimal() and int(count) >= 1:
            return value
        raise ValueError(
            "known are none, full, sqrt, selective and every-C, with C a number of layers (every-2)"
        )


class Optimizer(Section):
    name: Literal["adamw", "sgd", "muon"] = Field(
        default="adamw",
        description="AdamW; SGD with momentum; or Muon for the matrices of blocks and AdamW for the rest",
    )
    lr: Annotated[float, Field(gt=0)] = Field(
        default=1e-3, description="peak learning rate (preset tiny: 0.003)"
    )
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="decay of AdamW's two moments"
    )
    eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-8, description="AdamW's guard against division by zero"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="on matrices only; decoupled in adamw and muon, added to the gradient in sgd"
    )
    momentum: Decay | None = Field(
        default=None, description="sgd (default: 0.9) and muon (default: 0.95) only"
    )
    states: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32",
        description="moments: fp32 as the master weights; bf16, or AdamW's in 8 bits, by stochastic rounding",
    )
    offload: bool = Field(
        default=False,
        description="what only the optimizer uses lies in host memory; an update streams it through the GPU",
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="decay of an averaged copy of the weights, such as 0.999"
    )
    schedule: Literal["cosine", "wsd", "constant"] = Field(default="cosine", description="after warm-up")
    warmup: Count = Field(default=20, description="steps of linear warm-up")
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="wsd: fraction of the steps spent decaying"
    )
    min_lr: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="last learning rate, as a fraction of lr"
    )


class LayoutSection(Section):
    dp_replicate: Positive | None = Field(
        default=None, description="copies of the sharded model (HSDP), or DDP under zero 0"
    )
    dp_shard: Positive | None = Field(
        default=None, description="ranks that share one copy of the model's state (ZeRO)"
    )
    tp: Positive = Field(default=1, description="tensor degree")
    cp: Positive = Field(default=1, description="context degree")
    pp: Positive = Field(default=1, description="pipeline degree")
    ep: Positive = Field(default=1, description="expert degree")
    zero: Annotated[int, Field(ge=0, le=3)] | None = Field(
        default=None,
        description="what dp_shard splits: 0 nothing, 1 optimizer state, 2 + gradients, 3 + weights",
    )
    reduce: Literal["auto", "micro-batch", "step"] = Field(
        default="auto",
        description="when ZeRO 2 and 3 reduce gradients under accumulation; step keeps full gradients",
    )
    bucket_mb: Annotated[float, Field(gt=0)] = Field(
        default=25.0, description="size of a gradient bucket under zero 0, MB"
    )
    sequence_parallel: bool = Field(
        default=True, description="tp ranks split the sequence between the matrix products (norms, residuals)"
    )
    schedule: ScheduleName | None = Field(
        default=None, description="pipeline schedule (default under pp: 1f1b)"
    )
    virtual_stages: Positive | None = Field(
        default=None, description="stages a pipeline rank holds (default: 1, or 2 where the schedule loops)"
    )
    cp_kind: Literal["ring", "ulysses", "allgather"] | None = Field(
        default=None, description="how cp ranks attend to each other's tokens (default under cp: ring)"
    )
    auto: bool = Field(default=False, description="ask the planner")


class Communication(Section):
    tp_overlap: bool = Field(
        default=False, description="GPUs: run tp's gathers and reductions under its matrix products"
    )
    compress: Literal["none", "bf16", "int8"] = Field(
        default="none", description="gradients are summed over data ranks in 16 or 8 bits, which rounds them"
    )
    error_feedback: bool = Field(
        default=True, description="what compression rounds away is added to the next step's gradients"
    )
    compress_on: Literal["all", "replicate"] = Field(
        default="all", description="what compress is for: every sum of gradients, or those over dp_replicate"
    )
    local_steps: Positive = Field(
        default=1,
        description="steps that each replica (dp_replicate) takes alone before an outer step; 1: every step "
        "sums gradients over replicas",
    )
    outer_lr: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="rate of the outer step (default: 0.7); given, there are outer steps at 1 local step too",
    )
    outer_momentum: Decay | None = Field(
        default=None, description="Nesterov momentum of the outer step (default: 0.9)"
    )
    fragments: Positive | None = Field(
        default=None, description="parts of the weights that take turns with outer steps (default: 1)"
    )
    outer_delay: Count | None = Field(
        default=None, description="steps that go on while an outer average is on its way (default: 0)"
    )
    outer_mix: Decay | None = Field(
        default=None,
        description="share of its own weights that a replica keeps in an outer step (default: 0)",
    )

    @property
    def takes_outer_steps(self) -> bool:
        """Whether replicas train alone between outer steps."""
        return self.local_steps > 1 or self.outer_lr is not None or bool(self.outer_delay)


class Checkpoint(Section):
    every: Count = Field(default=0, description="steps between checkpoints; 0: by time, and at the end")
    minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=10.0, description="minutes between checkpoints; 0: only by steps, and at the end"
    )
    keep: Annotated[int, Field(ge=0)] = Field(
        default=2, description="how many checkpoints stay on disk; 0 writes none at all"
    )
    keep_every: Count = Field(
        default=0, description="checkpoints of every so many steps always stay; 0: none"
    )
    async_: bool = Field(default=True, alias="async", description="write while training goes on")
    other_data: bool = Field(
        default=False, description="go on although the files of data.source hold something else now"
    )


class Resilience(Section):
    restarts: Count = Field(
        default=3, description="how often ranks that failed are started again, from the last checkpoint"
    )
    non_finite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="loss or gradients are not finite: stop; skip the update; or rollback to the last "
        "checkpoint and leave the step out",
    )
    stall_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=600.0,
        description="seconds after which ranks that do not move are diagnosed and stopped; 0: never",
    )
    join_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=600.0, description="seconds that ranks have to find each other at the start"
    )
    elastic: bool = Field(
        default=False, description="go on with fewer ranks where some are lost, in another layout if need be"
    )


class Run(Section):
    name: str | None = Field(default=None, description="default: model and time")
    folder: str | None = Field(default=None, description="default: runs/NAME")
    tensorboard: bool = Field(default=True, description="write TensorBoard events into the run folder")
    wandb: str | None = Field(default=None, description="a Weights & Biases project to log to")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and (
            value in ("", ".", "..") or any(c in "/\\" or not c.isprintable() for c in value)
        ):
            raise ValueError("a name is not a path: give a path as run.folder")
        return value


class Cluster(Section):
    preset: str | None = Field(default=None, description="a built-in cluster")
    file: str | None = Field(default=None, description="path of a cluster file")


class Model(Section):
    """`preset`, `hf` or `weights` names a base; any field of `ModelSpec` beside it replaces the base's.

    `module` names a model of the user's own, which brings all its numbers itself.
    """

    model_config = ConfigDict(extra="allow")

    preset: str | None = Field(default=None, description="a built-in model; `tiny` when nothing else is said")
    hf: str | None = Field(default=None, description="path of a Hugging Face config.json, or of its folder")
    weights: str | None = Field(
        default=None,
        description="folder of Hugging Face weights to start from; brings its config and tokenizer along",
    )
    module: str | None = Field(
        default=None, description="your own model: file.py:Name or package.module:Name (docs/own-model.md)"
    )

    @cached_property
    def spec(self) -> ModelSpec:
        """The model this section describes. Raises `BadInput`."""
        if self.module is not None:
            return self.own_spec()
        fields: dict[str, Any] = dict(self.model_extra or {})
        if self.preset is not None and self.hf is not None:
            raise BadInput([Problem("model.preset", "given together with model.hf", "Keep one of the two.")])
        if self.hf is not None:
            base = read_config(self.hf)
        elif self.weights is not None and self.preset is None and not fields.keys() >= REQUIRED:
            base = read_config(self.weights, "model.weights")
        elif self.preset is not None or not fields:
            name = self.preset or "tiny"
            if name not in PRESETS:
                raise BadInput(
                    [Problem("model.preset", f"'{name}' is not known", did_you_mean(name, PRESETS))]
                )
            base = PRESETS[name]
        else:
            return _spec(fields)
        if self.weights is not None and (self.hf, self.preset) != (None, None):
            refuse(_other_config(base, read_config(self.weights, "model.weights"), fields, self.weights))
        return _spec(merged(base.model_dump(exclude_unset=True), fields))

    def unheeded(self) -> list[str]:
        """What its config asks of training and does not get (dropout): a sentence for each."""
        paths = (
            path for path in (self.hf, self.weights) if path is not None and Path(path).expanduser().exists()
        )
        return [sentence for path in dict.fromkeys(paths) for sentence in unheeded(path)]

    def own_spec(self, seq_len: int | None = None) -> ModelSpec:
        """As `spec`, of a user's own model, which is tried with sequences of a job's length."""
        assert self.module is not None
        given = {"preset": self.preset, "hf": self.hf, "weights": self.weights, **(self.model_extra or {})}
        refuse(
            Problem(f"model.{key}", "given together with model.module, which brings its own", "Leave it out.")
            for key, value in given.items()
            if value is not None
        )
        from fivefold.models.own.contract import LENGTH, inspected  # imports torch

        return inspected(self.module, seq_len or LENGTH)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, whose `spec` is made anew: pydantic would copy the old one along."""
        copy = super().model_copy(update=update, deep=deep)
        copy.__dict__.pop("spec", None)
        return copy


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees of tables in one; where they differ, `over`."""
    both = {**under, **over}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            both[key] = merged(under[key], over[key])
    return both


def _other_config(base: ModelSpec, theirs: ModelSpec, given: Mapping[str, Any], folder: str) -> list[Problem]:
    """Where the config of a folder of weights is that of another model; what the user gave is meant."""
    free = {"name", "init_std", *given} | ({"max_seq_len"} if base.positions == "rope" else set())
    hint = "Name the folder of that model, or leave model.hf and model.preset out: weights bring their own."
    return [
        Problem(f"model.{key}", f"{getattr(base, key)!r}, but {folder} has {getattr(theirs, key)!r}", hint)
        for key in ModelSpec.model_fields
        if key not in free and getattr(base, key) != getattr(theirs, key)
    ]


def _spec(fields: dict[str, Any]) -> ModelSpec:
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError as error:
        raise BadInput(problems_in(error, ModelSpec, "model", also=Model.model_fields)) from None


class Job(Section):
    """One training run. See the fields of each section for what a key means and allows."""

    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    layout: LayoutSection = LayoutSection()
    communication: Communication = Communication()
    checkpoint: Checkpoint = Checkpoint()
    resilience: Resilience = Resilience()
    run: Run = Run()
    cluster: Cluster = Cluster()

    def __init__(self, **sections: Any):
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise BadInput(problems_in(error, Job)) from None

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Only what was given: with every default it is 2,000 characters."""
        for name in type(self).model_fields:
            section = getattr(self, name)
            for key in (*type(section).model_fields, *(section.model_extra or {})):
                if key in section.model_fields_set and getattr(section, key) is not None:
                    yield f"{name}.{key}", getattr(section, key)

    @property
    def spec(self) -> ModelSpec:
        """The model that is trained."""
        own = self.model.module is not None
        return self.model.own_spec(self.training.seq_len) if own else self.model.spec

    @model_validator(mode="after")
    def _model_is_known(self) -> Job:
        _ = self.spec  # raises
        return self


def with_own_model(job: Job, model: Callable[[], Any] | None) -> Job:
    """The job with `model.module` naming a user's own class, or a function that makes the model.

    Raises `BadInput`.
    """
    if model is None:
        return job
    module = reference_of(model)
    named = Model.model_validate({**job.model.model_dump(exclude_unset=True), "module": module})
    named.own_spec(job.training.seq_len)
    return job.model_copy(update={"model": named})


def list_keys() -> list[Key]:
    """Every key of a job, in the order of the sections; the model's fields follow `model.module`."""
    fields = Keys(ModelSpec)
    model = list(fields.list("model", fields.root))
    job = Keys(Job)
    found = list(job.list("", job.root))
    after = 1 + max(index for index, key in enumerate(found) if key.name.startswith("model."))
    return found[:after] + model + found[after:]
