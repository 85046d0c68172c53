"""Which of many layouts are possible at all: the rules of `checks.check` and `config.resolve`, on arrays.

Those say why a job is impossible, in words, one job at a time. Here the same rules are predicates over a
`Setup` of any number of layouts; a test holds the two to each other. A setup means exactly what it says: one
that `resolve` would turn into another (ZeRO with nothing to shard, say) is not allowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.ledger.numbers import divided_up
from fivefold.ledger.setup import Setup

Possible = npt.NDArray[np.bool_] | bool


def allowed(setup: Setup) -> Possible:
    """Whether a job with this setup can be trained; for each layout where the setup stands for many.

    The setup must be on a device on which its communication settings work (tp_overlap wants GPUs).
    """
    rules = (_batch, _settings, _data, _tensor, _pipeline, _context, _expert)
    shape = np.broadcast_shapes(*(np.shape(value) for value in vars(setup).values() if _is_number(value)))
    verdicts = [np.broadcast_to(rule(setup), shape) for rule in rules]
    possible = np.logical_and.reduce(verdicts)
    return possible if shape else bool(possible)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.ndarray)


def _batch(setup: Setup) -> Any:
    """Sequences fit the model, and the batch splits into equal micro-batches."""
    unit = setup.micro_batch * setup.dp_replicate * setup.dp_shard
    return (setup.seq_len <= setup.spec.max_seq_len) & (setup.global_batch % unit == 0)


def _settings(setup: Setup) -> Any:
    """Every axis that is used has its settings, and no other has any."""
    used = setup.piped == bool(setup.schedule)
    used &= (setup.cp > 1) == bool(setup.cp_kind)
    used &= (setup.pp > 1) | (setup.virtual_stages == 1)
    return used & ((setup.tp > 1) | (not setup.tp_overlap))


def _data(setup: Setup) -> Any:
    if setup.reduce != "auto" and setup.zero < 2:
        return False
    if setup.compress != "none":
        return (setup.zero == 0) & (setup.dp_replicate * setup.cp > 1)
    return setup.dp_shard == 1 if setup.zero == 0 else setup.shard_ranks > 1


def _tensor(setup: Setup) -> Any:
    spec, tp = setup.spec, setup.tp
    fits = (spec.heads % tp == 0) & (spec.ffn % tp == 0)
    fits &= (spec.kv_heads % tp == 0) | (tp % spec.kv_heads == 0)
    fits &= divided_up(spec.vocab_size, tp) * (tp - 1) < spec.vocab_size  # the last rank gets a row
    if setup.sequence_parallel:
        return fits & (setup.seq_len % (setup.cp * tp) == 0)
    return fits & (not setup.tp_overlap)


def _pipeline(setup: Setup) -> Any:
    schedule, pp = setup.pipeline, setup.pp
    fits = schedule.allows(pp, setup.micro_batches) & (setup.reduce != "micro-batch")
    if schedule.stages is not None:
        fits &= setup.virtual_stages == schedule.stages
    return (pp == 1) | (fits & (setup.spec.layers >= setup.stages))


def _context(setup: Setup) -> Any:
    spec, cp = setup.spec, setup.cp
    if setup.cp_kind == "ulysses":
        return (setup.seq_len % cp == 0) & (spec.heads % (cp * setup.tp) == 0)
    whole_window = spec.sliding_window is None or spec.sliding_window >= setup.seq_len
    return (cp == 1) | (whole_window & (setup.seq_len % (2 * cp) == 0))


def _expert(setup: Setup) -> Any:
    """A model without experts counts as one that nobody can share."""
    ep = setup.ep
    fits = ((setup.spec.experts or 1) % ep == 0) & (setup.shard_ranks % ep == 0)
    return (ep == 1) | (fits & (setup.zero == 0 or setup.recompute != "selective"))
