"""A job's numbers, taken over by the names of its keys."""

from __future__ import annotations

import pytest

from fivefold.config import job_with, resolve
from fivefold.ledger.setup import Setup


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
