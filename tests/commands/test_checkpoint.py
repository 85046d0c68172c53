"""`fivefold checkpoint ls`: the cells of its table. What the verbs do: `tests/storage`, `tests/training`."""

from __future__ import annotations

from fivefold.commands.checkpoint import _cells


def test_sizes_are_told_in_gib_and_a_loss_only_where_there_is_one() -> None:
    listed = {"bytes": 3 * 2**30, "tensors": 1200, "files": 4, "loss": None}
    assert _cells(listed) == ["3.000", "1,200", "4", "", ""]
    assert _cells(listed | {"loss": 2.5})[3] == "2.5000"
    assert _cells({"step": 1, "damaged": "cut off"}) == ["", "", "", "", "damaged: cut off"]
