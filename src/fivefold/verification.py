"""Does this layout compute what one process computes? `fivefold verify` answers for a user's own job.

A shrunken copy of the job (narrow, few layers, short sequences, float64, packed random documents) takes one
step on one process and one under the job's layout. Loss, gradient norm and every parameter's gradient are
compared. In float64 rounding is some 1e-15, and a bug is not: there is nothing in between to argue about.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fivefold.axes.checks import check
from fivefold.axes.layout import MESH_ORDER, Layout, described
from fivefold.axes.stages import few_micro_batches
from fivefold.comm.world import World, device_kind
from fivefold.config import Job, Model, resolve, with_own_model
from fivefold.data.corpus import open_corpus
from fivefold.models.spec import ModelSpec
from fivefold.problems import refuse
from fivefold.training.build import build
from fivefold.training.launch import rank_count
from fivefold.training.promise import planned
from fivefold.training.ranks import run_ranks, stop_if_imported

ROUNDING = 1e-11
"""Differences up to this, relative to the largest gradient of a parameter, are rounding in float64."""

SMALL = 1e-3
"""A parameter's gradient is measured against at least this fraction of the largest gradient of all."""

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Computed:
    """One step's numbers: the loss, the gradient norm, and every parameter's whole gradient."""

    loss: float
    grad_norm: float
    gradients: Gradients


@dataclass(frozen=True, repr=False)
class Verdict:
    """What `verify` found. `axis` names the guilty axis when something differs, else None."""

    ok: bool
    worst_gradient_error: float
    worst_parameter: str
    parameters: int
    loss: float
    reference_loss: float
    grad_norm: float
    reference_grad_norm: float
    axis: str | None
    layout: str

    def as_json(self) -> dict[str, Any]:
        """By name; NaN and infinity, which JSON lacks, are None."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }

    def sentence(self) -> str:
        if self.ok:
            return (
                f"same (worst {self.worst_gradient_error:.0e}, rounding): {self.layout} against one process"
            )
        if self.worst_gradient_error > ROUNDING or math.isnan(self.worst_gradient_error):
            what = (
                f"the gradient of {self.worst_parameter} is off by {self.worst_gradient_error:.1e} "
                f"of its size (loss {self.loss!r} against {self.reference_loss!r})"
            )
        elif not _close(self.grad_norm, self.reference_grad_norm):
            what = f"the gradient norm is {self.grad_norm!r} against {self.reference_grad_norm!r}"
        else:
            what = f"the loss is {self.loss!r} against {self.reference_loss!r}"
        return f"different: {what} under {self.layout}; axis: {self.axis}"

    def __repr__(self) -> str:
        return self.sentence()


def gradient_error(found: Gradients, reference: Gradients) -> tuple[float, str]:
    """The worst difference, and where: max|g - g1| / max(max|g1|, SMALL * the largest gradient of all)."""
    if found.keys() != reference.keys():
        missing = sorted(found.keys() ^ reference.keys())
        return math.inf, missing[0]
    largest = max(float(g.abs().max()) for g in reference.values())
    errors = {
        name: float((found[name] - g).abs().max()) / max(float(g.abs().max()), SMALL * largest)
        for name, g in reference.items()
    }
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    return errors[worst], worst


def verify(job: Job, nproc: int | None = None, model: Callable[[], torch.nn.Module] | None = None) -> Verdict:
    """Compare one step of `job`'s layout with one process. Raises `BadInput` for an impossible job.

    model  a model of your own, by its class: short for `model.module`
    """
    stop_if_imported()
    job = with_own_model(job, model)
    ranks = rank_count(job, nproc, "cpu")
    job, _ = planned(job, ranks, device_kind())
    refuse(check(job))
    small = shrink(job)
    reference = run_ranks(compute, 1, on_one_process(small))[0]
    found = run_ranks(compute, ranks, small)[0]
    error, parameter = gradient_error(found.gradients, reference.gradients)
    ok = _same(found, reference)
    return Verdict(
        ok=ok,
        worst_gradient_error=error,
        worst_parameter=parameter,
        parameters=len(reference.gradients),
        loss=found.loss,
        reference_loss=reference.loss,
        grad_norm=found.grad_norm,
        reference_grad_norm=reference.grad_norm,
        axis=None if ok else guilty_axis(small, reference),
        layout=described(job) + _left_out(job),
    )


def _same(found: Computed, reference: Computed) -> bool:
    error, _ = gradient_error(found.gradients, reference.gradients)
    return (
        error <= ROUNDING
        and _close(found.loss, reference.loss)
        and _close(found.grad_norm, reference.grad_norm)
    )


def _close(found: float, reference: float) -> bool:
    return math.isclose(found, reference, rel_tol=ROUNDING)


def guilty_axis(job: Job, reference: Computed) -> str:
    """Turn the axes off one at a time; the one without which the numbers come right is to blame."""
    used = degrees_used(Layout.of(job))
    if len(used) < 2:
        return next(iter(used), "none: one process differs from itself")
    guilty = []
    for axis in used:
        without = with_degrees(job, {**used, axis: 1})
        found = run_ranks(compute, Layout.of(without).ranks, without)[0]
        if _same(found, reference):
            guilty.append(axis)
    if "ep" in guilty:
        # Without the ranks that experts are spread over there is no ep either: that says nothing more.
        guilty = [axis for axis in guilty if axis not in ("dp_shard", "cp")]
    return " with ".join(guilty) or "more than one of " + ", ".join(used)


def degrees_used(layout: Layout) -> dict[str, int]:
    """The axes that split anything and into how many."""
    return {axis: getattr(layout, axis) for axis in (*MESH_ORDER, "ep") if getattr(layout, axis) > 1}


def with_degrees(job: Job, degrees: dict[str, int]) -> Job:
    """The same training with other degrees (1 where none is given): the batch stays, its split follows.

    What an axis that is turned off had settings for goes with it. Experts stay spread as far as the ranks
    that are left allow.
    """
    given = dict.fromkeys((*MESH_ORDER, "ep"), 1) | degrees
    given["ep"] = math.gcd(given["ep"], given["dp_shard"] * given["cp"])
    old = job.layout
    zero = old.zero if given["dp_shard"] * given["cp"] > 1 else 0
    layout = old.model_copy(
        update={
            **given,
            "zero": zero,
            "reduce": old.reduce if zero and zero > 1 else "auto",
            "schedule": old.schedule if given["pp"] > 1 else None,
            "virtual_stages": old.virtual_stages if given["pp"] > 1 else None,
            "cp_kind": old.cp_kind if given["cp"] > 1 else None,
        }
    )
    training = job.training.model_copy(update={"micro_batch": 1})
    ranks = math.prod(given[axis] for axis in MESH_ORDER)
    return resolve(job.model_copy(update={"layout": layout, "training": training}), ranks)


def on_one_process(job: Job) -> Job:
    """The same training without any split: the whole batch at once, nothing recomputed."""
    training = job.training.model_copy(update={"micro_batch": job.training.global_batch, "recompute": "none"})
    return with_degrees(job, {}).model_copy(update={"training": training})


# --- the shrunken copy -----------------------------------------------------------------------------------


def _left_out(job: Job) -> str:
    """What was not verified, because it changes numbers by design."""
    given = job.communication.compress
    return "" if given == "none" else f" (without communication.compress = '{given}', which rounds gradients)"


def shrink(job: Job) -> Job:
    """A copy of a resolved job that runs in seconds and still has everything that can go wrong.

    Kept: the layout, tied weights, biases, norms, soft caps, grouped heads, experts, recompute mode,
    accumulation. Made small, as far as the layout still divides it: widths, layers, vocabulary (its remainder
    stays, so that padding does), sequences, micro-batches. A user's own model stays as it is.
    """
    layout = Layout.of(job)
    repeats = min(2, job.training.global_batch // (layout.data_ranks * (job.training.micro_batch or 1)))
    if layout.pp > 1:
        repeats = few_micro_batches(job)
    unit = 2 * layout.cp * layout.tp
    seq_len = min(job.training.seq_len, max(32, unit))
    training = job.training.model_copy(
        update={
            "precision": "fp64",
            "seq_len": seq_len,
            "micro_batch": 1,
            "global_batch": repeats * layout.data_ranks,
            "compile": False,
            "steps": 1,
        }
    )
    model = job.model
    if model.module is None:
        spec = shrink_spec(job.spec, seq_len, layout, stages=layout.pp * (job.layout.virtual_stages or 1))
        model = Model.model_validate(spec.model_dump(exclude_none=True))
    # What compression rounds away would hide what a layout does wrong.
    communication = job.communication.model_copy(update={"compress": "none"})
    return job.model_copy(update={"training": training, "model": model, "communication": communication})


def shrink_spec(spec: ModelSpec, seq_len: int, layout: Layout | None = None, stages: int = 1) -> ModelSpec:
    """A model of the same make, a few thousand parameters large, that `layout` and its stages can split."""
    layout = layout or Layout()
    kv_heads, heads = _few_heads(spec, layout)
    head_dim = min(spec.head_dim, 8)
    dim = heads * head_dim if spec.dim == spec.heads * spec.head_dim else heads * head_dim + 8
    return spec.model_copy(
        update={
            "name": f"{spec.name} (small)",
            "vocab_size": min(spec.vocab_size, 64 * max(1, layout.tp // 8) + spec.vocab_size % 64),
            "dim": dim,
            "layers": min(spec.layers, max(4, stages)),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn": min(spec.ffn, math.ceil(2 * dim / layout.tp) * layout.tp),
            "max_seq_len": max(seq_len, 32),
            "full_attention_every": None if spec.full_attention_every is None else 2,
            "sliding_window": None
            if spec.sliding_window is None
            else min(spec.sliding_window, max(1, seq_len // 2)),
        }
    )


def _few_heads(spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """(kv_heads, heads): few, but as splittable over tp and cp as the model's own are."""
    kv_heads = next(
        n
        for n in range(1, spec.kv_heads + 1)
        if n >= min(spec.kv_heads, 4)
        and math.gcd(n, layout.tp) == math.gcd(spec.kv_heads, layout.tp)
        and (n == 1) == (spec.kv_heads == 1)
    )
    repeats = spec.heads // spec.kv_heads
    unit = layout.tp * layout.cp
    few = next(
        n
        for n in range(1, repeats + 1)
        if n >= min(repeats, 2) and math.gcd(kv_heads * n, unit) == math.gcd(kv_heads * repeats, unit)
    )
    return kv_heads, kv_heads * few


# --- on a rank -------------------------------------------------------------------------------------------


def compute(world: World, job: Job) -> Computed:
    """One step's numbers on this rank, with every gradient put together from its shards."""
    built = build(job, world.device)
    corpus = open_corpus(
        "random",
        seq_len=job.training.seq_len,
        seed=job.training.seed,
        vocab_size=job.spec.vocab_size,
        separate_documents=job.data.separate_documents,
        document_length=max(2, job.training.seq_len // 4),
    )
    with corpus.train_loader(
        global_batch=job.training.global_batch,
        micro_batch=job.training.micro_batch or 1,
        rank=built.mesh.data_rank,
        ranks=built.mesh.layout.data_ranks,
        start_step=0,
    ) as loader:
        batches = next(iter(loader))
    loss = built.step.backward(batches, built.step.count_tokens(batches))
    gradients = built.step.collect()
    total, norm = built.step.totals(loss, gradients)
    return Computed(total.item(), norm.item(), built.weights.whole(gradients))
