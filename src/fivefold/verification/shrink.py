"""The shrunken copy of a job: it runs in seconds, and splits as the job does.

One idea for every size: n becomes the smallest n' above a minimum that leaves the same remainder modulo all
that the layout divides it by. What divides that modulus divides n' exactly if it divides n, so a copy is as
even, or as uneven, as the job; where nothing smaller does, n stays.
"""

import math
from typing import Any

from fivefold.axes.checks import check
from fivefold.axes.layout import Layout
from fivefold.axes.stages import few_micro_batches
from fivefold.config import Job, Model, fp8, local_steps, resolve
from fivefold.ledger.fp8 import MULTIPLE
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count
from fivefold.models.own.spec import OwnSpec
from fivefold.models.spec import ModelSpec
from fivefold.problems import Problem, refuse

ROWS = 2
"""Sequences in a micro-batch: with one alone, rows in another order would look the same."""
STEPS = 2
"""The second step sees what the first one's update left behind."""
CLIP = 0.1
"""Below the gradient norm of a fresh model: a job that clips must do so here."""
EPS = 1e-3
"""AdamW's guard. The usual one makes a full step of a gradient that is nothing but rounding."""
ALIGNED = 8
"""Kernels of GPUs take widths that this divides another way than others."""
MOST_PARAMETERS = 100_000_000


def shrink(job: Job) -> Job:
    """A small copy of a resolved job, in float64, that every rule allows. Raises `BadInput` where none is.

    Kept: the layout, tied weights, biases, norms, soft caps, grouped heads, experts, recompute mode, a loss
    in chunks, accumulation, clipping, the optimizer. A user's own model stays as it is.
    """
    layout = Layout.of(job)
    # Layers in 8 bits take part by their shapes, in the job's own precision: in the copy, too.
    tokens = 1 if job.training.fp8 == "none" else MULTIPLE // ROWS * layout.cp
    seq_len = smallest(job.training.seq_len, max(32, tokens), math.lcm(2 * layout.cp * layout.tp, tokens))
    training = job.training.model_copy(
        update={
            "precision": "fp64",
            "compile": False,
            **fp8.WITHOUT,
            "seq_len": seq_len,
            "micro_batch": ROWS,
            "global_batch": ROWS * micro_batches(job) * layout.data_ranks,
            "steps": STEPS,
            "validate_batches": 1,
            "clip": min(job.training.clip, CLIP),
            "loss_chunk": _loss_chunk(job, ROWS * seq_len // layout.cp),
        }
    )
    optimizer = job.optimizer.model_copy(update={"eps": max(job.optimizer.eps, EPS), "states": "fp32"})
    # What compression rounds away would hide what a layout does wrong.
    # One process takes no outer steps: replicas that train alone are other numbers by design.
    plain = local_steps.without(job.communication)
    whole = {"compress": "none", "compress_on": "all", "error_feedback": True}
    communication = plain.model_copy(update=whole | {"tp_overlap": False})
    # Numbers that are not finite are something to compare, too.
    resilience = job.resilience.model_copy(update={"non_finite": "skip"})
    sections: dict[str, Any] = {
        "training": training,
        "optimizer": optimizer,
        "communication": communication,
        "resilience": resilience,
    }
    if not isinstance(job.spec, OwnSpec):
        spec = shrink_spec(job, seq_len)
        sections["model"] = Model.model_validate(spec.model_dump(exclude_none=True))
    small = resolve(job.model_copy(update=sections), layout.ranks)
    refuse(check(small))
    refuse(_too_large(job, small))
    return small


def aligned(job: Job) -> int:
    """What divides the sides of matrices of the copy, if it does those of the job's."""
    return ALIGNED if job.training.fp8 == "none" else MULTIPLE


def smallest(size: int, at_least: int, modulus: int) -> int:
    """The smallest number from `at_least` on that leaves the remainder of `size`, which it never exceeds."""
    return min(size, at_least + (size - at_least) % modulus)


def micro_batches(job: Job) -> int:
    """How many a step of the copy has: accumulation stays accumulation, and a pipeline is filled."""
    own = int(Setup.of(job).micro_batches)
    return min(own, 2 if job.layout.pp == 1 else few_micro_batches(job))


def _loss_chunk(job: Job, tokens: int) -> int:
    """What makes three chunks of a rank's `tokens`, the last one shorter; or one, where the job has one."""
    own = job.training.loss_chunk
    return max(1, 2 * tokens // 5) if 0 < own < int(Setup.of(job).tokens) else own


def shrink_spec(job: Job, seq_len: int) -> ModelSpec:
    """A model of the same make, a few thousand parameters large, that the job's layout splits as evenly."""
    spec, layout = job.spec, Layout.of(job)
    stages = layout.pp * (job.layout.virtual_stages or 1)
    kv_heads, heads, head_dim, dim = _narrow(job)
    # Rows of matrices are dealt to tp ranks first, then to shards.
    rows = layout.tp * layout.shard_ranks
    window = spec.sliding_window
    if window is not None:
        window = seq_len if window >= job.training.seq_len else min(window, max(1, seq_len // 2))
    return spec.model_copy(
        update={
            "name": f"{spec.name} (small)",
            "vocab_size": smallest(spec.vocab_size, max(64, layout.tp**2), rows),
            "dim": dim,
            "layers": smallest(spec.layers, max(_layers(job), stages), stages),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn": smallest(spec.ffn, 2 * dim, math.lcm(rows, aligned(job) * layout.tp)),
            "max_seq_len": smallest(spec.max_seq_len, seq_len, layout.shard_ranks),
            "full_attention_every": None if spec.full_attention_every is None else 2,
            "sliding_window": window,
        }
    )


def _layers(job: Job) -> int:
    """Enough for a layer with another before it; or for two segments of layers that are recomputed."""
    return 4 if job.training.recompute.startswith(("sqrt", "every")) else 2


def _narrow(job: Job) -> tuple[int, int, int, int]:
    """(kv_heads, heads, head_dim, dim): grouped heads stay so, and heads fill the stream where they did."""
    spec, shards = job.spec, Layout.of(job).shard_ranks
    unit = aligned(job)
    narrow = smallest(spec.head_dim, unit, unit)
    shapes = [
        (kv_heads, heads, width)
        for kv_heads, heads in (_few_heads(job), (spec.kv_heads, spec.heads))
        for width in range(narrow, spec.head_dim + 1, unit)
    ]
    if spec.dim == spec.heads * spec.head_dim:
        return next((*s, s[1] * s[2]) for s in shapes if (s[1] * s[2] - spec.dim) % shards == 0)
    wider = ((*s, smallest(spec.dim, s[1] * s[2] + unit, math.lcm(unit, shards))) for s in shapes)
    return next(found for found in wider if found[1] * found[2] != found[3])


def _few_heads(job: Job) -> tuple[int, int]:
    """(kv_heads, heads) that split over tp ranks, and under ulysses over cp ranks, as the model's own do."""
    spec = job.spec
    modulus = job.layout.tp * (job.layout.cp if job.layout.cp_kind == "ulysses" else 1)
    kv_heads, ratio = smallest(spec.kv_heads, 2, modulus), spec.heads // spec.kv_heads
    fitting = (n for n in range(2, ratio) if (kv_heads * n - spec.heads) % modulus == 0)
    return kv_heads, kv_heads * next(fitting, ratio)


def _too_large(job: Job, small: Job) -> list[Problem]:
    """Why even the smallest legal copy is no small job."""
    if isinstance(small.spec, OwnSpec) or (count := parameter_count(small.spec)) <= MOST_PARAMETERS:
        return []
    sizes = (
        n for n in ("heads", "head_dim", "ffn", "vocab_size", "layers", "experts") if getattr(small.spec, n)
    )
    largest = max(sizes, key=lambda n: getattr(small.spec, n))
    old, new = getattr(job.spec, largest), getattr(small.spec, largest)
    message = f"{old} becomes {new} in the smallest copy that splits as this job does: {count:,} parameters"
    hint = (
        f"At most {MOST_PARAMETERS:,} are computed twice in float64: use a smaller model.{largest} or degree."
    )
    return [Problem(f"model.{largest}", message, hint)]


def shrunk(job: Job, small: Job) -> dict[str, tuple[int, int]]:
    """Every number that the copy has smaller, by its key: (the job's, the copy's)."""
    keys = [("training", key) for key in ("seq_len", "micro_batch", "global_batch", "loss_chunk")]
    if not isinstance(job.spec, OwnSpec):
        keys += [
            ("model", key) for key in ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn")
        ]
        keys += [("model", key) for key in ("max_seq_len", "sliding_window")]
    found = {}
    for section, key in keys:
        one, other = ((j.spec if section == "model" else j.training) for j in (job, small))
        size, now = getattr(one, key), getattr(other, key)
        if size is not None and now < size:
            found[f"{section}.{key}"] = (size, now)
    return found
