"""The numbers a job leaves open, filled in; the impossible and the not yet possible, refused."""

import math
from pathlib import Path
from typing import Literal

from fivefold.config import conditions, fp8, local_steps, optimizers
from fivefold.config.complain import shown
from fivefold.config.schema import Data, DataSource, Job, LayoutSection, Model, Training
from fivefold.models.own.reference import absolute
from fivefold.models.own.spec import OwnSpec
from fivefold.models.spec import ModelSpec
from fivefold.problems import Problem, either, nearest_multiples, refuse
from fivefold.schedules import schedule_named


def resolve(job: Job, ranks: int, device: Literal["cuda", "cpu"] = "cpu") -> Job:
    """The job with every open number filled in for `ranks` ranks. Raises `BadInput`.

    layout    `zero` is over `dp_shard` (and `cp`, whose ranks share the state in the same way). The data
              degree left out fills up to the rank count: `dp_shard`, or `dp_replicate` under zero 0. `zero`
              defaults to 3 where `dp_shard` is above 1; with dp_shard x cp = 1 there is nothing to shard, and
              it becomes 0. `schedule`, `virtual_stages` and `cp_kind` get defaults where their axis is used.
    training  `micro_batch` is a rank's whole share of the batch, or under pp a part of it; `precision` is
              bf16 on a GPU and with fp8, else fp32; an expert model's `balance` and `routing` get defaults.
    optimizer `momentum`, where there is any.
    communication  what is not said of outer steps, where the job takes any.
    data      every entry of a mix gets a weight; `tokenizer` is that of `model.weights` where it has one.
    model     a Hugging Face config becomes its fields, so that the job no longer depends on that file; the
              file of a user's own model gets its whole path.

    What `layout.auto` leaves to the planner must have been chosen before: see `fivefold.planner.auto`.

    Resolving a resolved job again changes nothing.
    """
    if job.layout.auto:
        raise ValueError("the job's layout is still the planner's to choose: see fivefold.planner.auto")
    spec = job.spec
    layout = _filled_layout(job.layout, ranks)
    misfit = _layout_problems(layout, ranks)
    # A batch can only be judged against a layout that fits.
    refuse(
        [
            *_cluster_problems(job),
            *_unused(job, spec, device),
            *_own_problems(job, spec),
            *_rollback_problems(job),
            *optimizers.problems(job.optimizer),
            *states_problems(job),
            *offload_problems(job),
            *local_steps.problems(job),
            *fp8.problems(job, spec),
            *length_problems(job, spec),
            *(misfit or _batch_problems(job.training, layout)),
        ]
    )
    return job.model_copy(
        update={
            "model": _self_contained(job.model, spec),
            "data": _weighted(_with_tokenizer(job)),
            "training": _filled_training(job.training, layout, device, spec),
            "layout": layout,
            "optimizer": optimizers.filled(job.optimizer),
            "communication": local_steps.filled(job.communication),
        }
    )


def ranks_given(layout: LayoutSection) -> int | None:
    """How many ranks the degrees of a layout make, as far as they are given; None where none is."""
    given = [degree for degree in (layout.dp_replicate, layout.dp_shard) if degree is not None]
    given += [degree for degree in (layout.cp, layout.tp, layout.pp) if degree > 1]
    return math.prod(given) if given else None


def _filled_layout(given: LayoutSection, ranks: int) -> LayoutSection:
    others = given.cp * given.tp * given.pp
    replicate, shard = given.dp_replicate, given.dp_shard
    zero = given.zero
    if shard == 1 and (zero is None or given.cp == 1):
        zero = 0
    if zero == 0:
        shard = shard or 1
        replicate = replicate or max(1, ranks // (others * shard))
    else:
        replicate = replicate or 1
        shard = shard or max(1, ranks // (others * replicate))
        if zero is None:
            zero = 3 if shard > 1 else 0
        elif shard * given.cp == 1:
            zero = 0
    update = {"dp_replicate": replicate, "dp_shard": shard, "zero": zero}
    return given.model_copy(update=update | _filled_kinds(given))


def _filled_kinds(given: LayoutSection) -> dict[str, object]:
    filled: dict[str, object] = {}
    if given.pp > 1:
        schedule = schedule_named(given.schedule or "1f1b")
        filled["schedule"] = schedule.name
        filled["virtual_stages"] = given.virtual_stages or schedule.usual_stages
    if given.cp > 1:
        filled["cp_kind"] = given.cp_kind or "ring"
    return filled


def _filled_training(given: Training, layout: LayoutSection, device: str, spec: ModelSpec) -> Training:
    filled: dict[str, object] = {
        "micro_batch": given.micro_batch
        or _micro_batch(given.global_batch // _data_ranks(layout), layout.pp),
        "precision": given.precision or given.usual_precision(device),
    }
    if spec.experts is not None:
        filled["balance"] = given.balance or "loss"
        if filled["balance"] == "loss":
            filled["balance_weight"] = 0.01 if given.balance_weight is None else given.balance_weight
        if filled["balance"] == "bias":
            filled["balance_rate"] = given.balance_rate or 0.001
        filled["routing"] = given.routing or "learned"
    return given.model_copy(update=filled)


def _micro_batch(share: int, pp: int) -> int:
    """How many of a rank's `share` of the sequences go through at a time by default.

    All of them; but a pipeline is kept busy by many micro-batches: there as few as make 4 for each stage, or
    as many micro-batches as there can be.
    """
    if pp == 1:
        return share
    return max(
        size for size in range(1, share + 1) if share % size == 0 and (size == 1 or share // size >= 4 * pp)
    )


def _with_tokenizer(job: Job) -> Data:
    if job.model.weights is None or "tokenizer" in job.data.model_fields_set:
        return job.data
    folder = Path(job.model.weights).expanduser().absolute()
    found = (folder / "tokenizer.json").is_file()
    return job.data.model_copy(update={"tokenizer": str(folder)}) if found else job.data


def _weighted(data: Data) -> Data:
    if isinstance(data.source, str):
        return data
    mix = [DataSource(path=entry) if isinstance(entry, str) else entry for entry in data.source]
    return data.model_copy(update={"source": mix})


def _self_contained(model: Model, spec: ModelSpec) -> Model:
    if model.module is not None:
        return model.model_copy(update={"module": absolute(model.module)})
    weights = None if model.weights is None else str(Path(model.weights).expanduser().absolute())
    if model.hf is None and weights is None:
        return model
    return Model.model_validate(
        spec.model_dump(exclude_unset=True, exclude_none=True) | ({"weights": weights} if weights else {})
    )


def _data_ranks(layout: LayoutSection) -> int:
    """How many ways a filled layout splits the batch."""
    return (layout.dp_replicate or 1) * (layout.dp_shard or 1)


def _layout_problems(layout: LayoutSection, ranks: int) -> list[Problem]:
    """Why a filled layout does not span the ranks."""
    if not conditions.zero_fits(layout.zero or 0, layout.dp_shard, layout.cp):
        hint = f"Use layout.dp_replicate = {layout.dp_shard}, or layout.zero = 1, 2 or 3."
        return [
            Problem("layout.dp_shard", f"{layout.dp_shard} under layout.zero = 0, which shards nothing", hint)
        ]
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    degrees = {name: getattr(layout, name) for name in names}
    product = math.prod(degrees.values())
    if product == ranks:
        return []
    fixes = {}
    for name in ("dp_shard", "dp_replicate") if layout.zero else ("dp_replicate",):
        others = product // degrees[name]
        if ranks % others == 0:
            fixes[f"layout.{name}"] = ranks // others
    split = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one rank"
    wrong = next(iter(fixes), next((f"layout.{name}" for name in names if ranks % degrees[name]), "layout"))
    changes = [*(f"{key} = {degree}" for key, degree in fixes.items()), f"--nproc {product}"]
    message = f"{split} makes {product}, but there are {ranks} ranks"
    return [Problem(wrong, message, f"Use {', or '.join(changes)}.")]


def _batch_problems(training: Training, layout: LayoutSection) -> list[Problem]:
    """Why the batch does not split into equal micro-batches, and the nearest numbers that do."""
    batch, micro, ranks = training.global_batch, training.micro_batch, _data_ranks(layout)
    if conditions.batch_splits(batch, micro or 1, ranks):
        return []
    hint = f"Use training.global_batch = {nearest_multiples(batch, ranks * (micro or 1))}"
    if micro is None:
        message = f"{batch} does not split evenly over {ranks} data ranks"
        return [Problem("training.global_batch", message, f"{hint}.")]
    if batch % ranks == 0:
        share = batch // ranks
        sizes = [n for n in range(1, share + 1) if share % n == 0]
        near = [n for n in sizes if n < micro][-1:] + [n for n in sizes if n > micro][:1]
        hint += f", or training.micro_batch = {either(near)}"
    split = f"micro-batches of {micro} on {ranks} data rank{'s' if ranks > 1 else ''}"
    return [Problem("training.global_batch", f"{batch} does not split evenly into {split}", f"{hint}.")]


def length_problems(job: Job, spec: ModelSpec) -> list[Problem]:
    """Why a model does not take sequences of the job's length."""
    length = job.training.seq_len
    if conditions.length_fits(length, spec.max_seq_len):
        return []
    if isinstance(spec, OwnSpec):
        hint = f"Use at most {spec.max_seq_len}: its `max_seq_len` says so."
        message = f"{job.training.seq_len} is longer than model.module takes"
        return [Problem("training.seq_len", message, hint)]
    hint = f"Use at most {spec.max_seq_len}, or raise model.max_seq_len " + (
        "(rotary positions have no table, but the model was made for shorter sequences)."
        if spec.positions == "rope"
        else "(the table of learned positions grows with it)."
    )
    return [Problem("training.seq_len", f"{length} is longer than the model's {spec.max_seq_len}", hint)]


def _unused(job: Job, spec: ModelSpec, device: str) -> list[Problem]:
    """Settings of something that this job does not have: refused, never ignored."""
    layout, training = job.layout, job.training
    problems = []
    for setting, axis in conditions.AXIS_OF.items():
        value = getattr(layout, setting)
        if value is not None and getattr(layout, axis) == 1:
            hint = f"Leave it out, or set layout.{axis} above 1."
            problems.append(Problem(f"layout.{setting}", f"{shown(value)} without layout.{axis}", hint))
    if spec.experts is None:
        given = {"layout.ep": None if conditions.experts_fit(layout.ep, spec.experts) else layout.ep}
        given |= {f"training.{key}": getattr(training, key) for key in ("balance", "routing")}
        hint, what = "Leave it out, or set model.experts.", "a model without experts"
        if isinstance(spec, OwnSpec):
            hint, what = "Leave it out.", "model.module: which of its parameters are experts is not known"
        problems += [
            Problem(key, f"{shown(value)} for {what}", hint)
            for key, value in given.items()
            if value is not None
        ]
    for key, balance in (("balance_weight", "loss"), ("balance_rate", "bias")):
        value = getattr(training, key)
        using = training.balance or ("loss" if spec.experts is not None else None)
        if value is not None and using != balance:
            message = f"{shown(value)} without training.balance = '{balance}'"
            problems.append(Problem(f"training.{key}", message, "Leave it out, or set training.balance."))
    alone = not conditions.overlap_fits(job.communication.tp_overlap, layout.tp)
    if alone or (job.communication.tp_overlap and device != "cuda"):
        lacking = "layout.tp above 1" if alone else "GPUs"
        problems.append(Problem("communication.tp_overlap", f"true without {lacking}", "Leave it out."))
    return problems


def _own_problems(job: Job, spec: ModelSpec) -> list[Problem]:
    """What cannot be had with a user's own model."""
    if not isinstance(spec, OwnSpec):
        return []
    problems = []
    if job.data.separate_documents and not spec.takes_documents:
        message = "true, but the blocks of model.module take no documents and would mix those of one sequence"
        hint = "Set data.separate_documents = false, or let the blocks' forward have an argument `documents`."
        problems.append(Problem("data.separate_documents", message, hint))
    if job.training.loss_chunk:
        message = f"{job.training.loss_chunk}: what the head of model.module does to make logits is not known"
        hint = "Leave it out, or set it to 0: all logits at once."
        problems.append(Problem("training.loss_chunk", message, hint))
    for key, value in (("preset", job.cluster.preset), ("file", job.cluster.file)):
        if value is not None:
            problems.append(unplanned(f"cluster.{key}", value))
    return problems


def states_problems(job: Job) -> list[Problem]:
    """Why the optimizer's states cannot be kept as the job says."""
    optimizer, precision = job.optimizer, job.training.precision
    if conditions.states_fit(optimizer.states, optimizer.name, precision):
        return []
    where = f"optimizer.name = '{optimizer.name}'"
    hint = "Leave it out, or set optimizer.name to 'adamw' or 'muon'."
    if conditions.states_fit(optimizer.states, optimizer.name, None):
        where, hint = f"training.precision = '{precision}'", "Leave it out, or train in bf16, fp16 or fp32."
    return [Problem("optimizer.states", f"{shown(optimizer.states)} under {where}", hint)]


def offload_problems(job: Job) -> list[Problem]:
    """Why the optimizer's states cannot lie in host memory."""
    optimizer, outer = job.optimizer, job.communication.takes_outer_steps
    if conditions.offload_fits(optimizer.offload, optimizer.name, outer):
        return []
    message = "true with optimizer.name = 'muon', whose updates need whole matrices"
    hint = "Leave it out, or set optimizer.name = 'adamw'."
    if conditions.offload_fits(optimizer.offload, optimizer.name, False):
        message = "true with outer steps, whose weights and momentum would stay on the device"
        hint = "Leave it out, or let replicas sum gradients in every step (communication.local_steps = 1)."
    return [Problem("optimizer.offload", message, hint)]


def _rollback_problems(job: Job) -> list[Problem]:
    if job.resilience.non_finite != "rollback" or job.checkpoint.keep:
        return []
    hint = "Set checkpoint.keep to 1 or more, or resilience.non_finite to 'skip' or 'stop'."
    return [Problem("resilience.non_finite", "'rollback' without checkpoints: checkpoint.keep = 0", hint)]


def unplanned(key: str, value: object) -> Problem:
    """The planner was asked about a user's own model."""
    message = f"{shown(value)}: the time and memory of a model of your own are not known"
    return Problem(key, message, "The planner takes presets and Hugging Face configs: leave this out.")


def _cluster_problems(job: Job) -> list[Problem]:
    if job.cluster.preset is None or job.cluster.file is None:
        return []
    return [Problem("cluster.preset", "given together with cluster.file", "Keep one of the two.")]
