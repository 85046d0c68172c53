"""A job's numbers, taken over by the names of its keys."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fivefold.config import job_with, resolve
from fivefold.ledger.setup import Setup, segment_length


def test_a_key_of_the_same_name_in_another_section_is_not_taken() -> None:
    """The optimizer has a schedule too, of its learning rate; without a pipeline there is no other."""
    job = resolve(job_with({"optimizer.schedule": "cosine"}), 1, "cpu")
    assert Setup.of(job).schedule == ""


@pytest.mark.parametrize("section", ["layout", "training"])
def test_a_job_that_leaves_numbers_open_is_refused(section: str) -> None:
    resolved = resolve(job_with({}), 1, "cpu")
    opened = {"layout": {"dp_shard": None}, "training": {"micro_batch": None}}[section]
    job = resolved.model_copy(update={section: getattr(resolved, section).model_copy(update=opened)})
    with pytest.raises(ValueError, match="still open"):
        Setup.of(job)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [({}, 1), ({"dp_shard": 4, "zero": 1}, 4), ({"dp_replicate": 2, "dp_shard": 2, "pp": 2, "tp": 2}, 16)],
)
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_micro_batches_of_all_data_ranks_make_the_batch(
    layout: dict[str, Any], ranks: int, micro_batch: int
) -> None:
    keys = {f"layout.{key}": value for key, value in layout.items()}
    given = {"training.global_batch": 48, "training.micro_batch": micro_batch}
    setup = Setup.of(resolve(job_with(keys | given), ranks, "cpu"))
    batches = int(setup.micro_batches)
    assert batches * micro_batch * layout.get("dp_replicate", 1) * layout.get("dp_shard", 1) == 48


@pytest.mark.parametrize("layers", [64, 144])
def test_segments_of_the_root_keep_the_least(layers: int) -> None:
    """A layer for each segment, and those of the one that is run again: C + n/C is least at the root."""
    kept = {count: count + layers / count for count in range(1, layers + 1)}
    assert segment_length("sqrt", layers) == layers // min(kept, key=lambda count: kept[count])
    assert segment_length("sqrt", layers) == math.isqrt(layers)
    assert (segment_length("full", layers), segment_length("none", layers)) == (1, None)
    assert (segment_length("every-4", layers), segment_length("every-400", layers)) == (4, layers)
