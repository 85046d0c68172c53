"""The ledger's weights and gradients, which are a replay of the step without its activations."""

from __future__ import annotations

from fivefold.axes.data import EXPERTS, sharded_groups
from fivefold.axes.layout import Place
from fivefold.replay.account import account
from tests.cases import SPEC, Case


def test_experts_are_gathered_inside_their_block() -> None:
    """With all forward passes first, the head's weights lie there while a block runs with its experts.

    Measured on two running ranks of each stage: 58752 bytes, as here.
    """
    layout = {"dp_shard": 2, "pp": 2, "ep": 2, "zero": 3, "schedule": "gpipe"}
    training = {"micro_batch": 1, "precision": "fp32", "routing": "balanced"}
    job = Case("gpipe", 4, layout, training, spec=SPEC | {"experts": 4, "experts_per_token": 2}).job()
    group = {group.name: group.size.padded for group in sharded_groups(job, Place(pp=1))}
    together = group["head"] + group["blocks.3"] + group["blocks.3" + EXPERTS]
    assert account(job, Place(pp=1)).peak("weights") == 4 * together == 58752


def test_blocks_that_are_recomputed_together_are_gathered_together() -> None:
    """Freed after each use: two blocks at a time in backward, where forward has one and then the head."""
    layout, training = {"dp_shard": 2, "zero": 3}, {"precision": "fp32", "micro_batch": 1}
    peaks = []
    for recompute in ("full", "every-2"):
        job = Case(recompute, 2, layout, training | {"recompute": recompute}).job()
        group = {group.name: group.size.padded for group in sharded_groups(job, Place())}
        peaks.append(account(job).peak("weights") / (4 * group["blocks.0"]))
        assert group["head"] < group["blocks.0"]
    assert peaks == [1, 2]
