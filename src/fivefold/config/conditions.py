"""Conditions that `resolve` asks of one job, and a search of arrays of numbers.

The rules of an axis stand with the axis. These are about what a job leaves open or out, which only `resolve`
sees, so its words stand there.
"""

from typing import Any

AXIS_OF = {"schedule": "pp", "virtual_stages": "pp", "cp_kind": "cp"}
"""The layout's settings of an axis: where its degree is 1 they must be left out."""
STATES = ("fp32", "bf16", "int8")
"""What the optimizer's states can be kept in, the widest first."""


def length_fits(seq_len: Any, longest: Any) -> Any:
    """Sequences are not longer than the model's."""
    return seq_len <= longest


def batch_splits(global_batch: Any, micro_batch: Any, data_ranks: Any) -> Any:
    """Every data rank gets the same number of whole micro-batches."""
    return global_batch % (micro_batch * data_ranks) == 0


def zero_fits(zero: int, dp_shard: Any, cp: Any) -> Any:
    """ZeRO 1 to 3 have ranks to shard over, and under zero 0 nothing is sharded."""
    return dp_shard == 1 if zero == 0 else dp_shard * cp > 1


def overlap_fits(tp_overlap: bool, tp: Any) -> Any:
    """Only tensor ranks have messages to overlap."""
    return not tp_overlap or tp > 1


def states_fit(states: str, optimizer: str, precision: str | None) -> bool:
    """AdamW and Muon keep their states in fewer bits, beside master weights in 32."""
    return states == "fp32" or (optimizer in ("adamw", "muon") and precision != "fp64")


def narrower_states(states: str, optimizer: str, precision: str) -> list[str]:
    """What would take less memory than these `states`, the widest first."""
    return [kind for kind in STATES[STATES.index(states) + 1 :] if states_fit(kind, optimizer, precision)]


def offload_fits(offload: bool, optimizer: str, outer_steps: bool) -> bool:
    """An update goes piece by piece, which Muon's of whole matrices cannot; outer steps have more states."""
    return not offload or (optimizer != "muon" and not outer_steps)


def experts_fit(ep: Any, experts: int | None) -> Any:
    """Only a model with experts spreads them."""
    return (ep == 1) | (experts is not None)
