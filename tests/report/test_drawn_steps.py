"""A collective step by step: what is drawn is what the algorithm does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.comm.algorithms import ALGORITHMS
from fivefold.report.drawn_steps import lines, picture
from tests.commands.typed import typed


def test_a_ring_is_told_step_by_step() -> None:
    told = lines(ALGORITHMS["ring"], 4)
    assert told[0] == "all_reduce by ring: 4 ranks, 6 steps; the busiest rank sends 1.5 tensors in 6 messages"
    second = told.index("step 2")
    assert told[second + 1 : second + 4] == [
        "          0 1 2 3  <- chunk",
        "  rank 0  1 1 2 1  chunk 2 to rank 1, which adds",
        "  rank 1  1 1 1 2  chunk 3 to rank 2, which adds",
    ]
    end = told.index("at the end")
    assert [line.split()[2:] for line in told[end + 2 :]] == [["4"] * 4] * 4


def test_what_a_rank_does_not_have_is_a_dot() -> None:
    told = lines(ALGORITHMS["pairwise"], 3)
    assert "sends 0.667 tensors in 2 messages" in told[0]
    (second,) = (line for line in told[:6] if line.startswith("  rank 1 "))
    assert second.startswith("  rank 1  . . . 1 1 1 . . .  chunk 5 to rank 2")


@pytest.mark.parametrize("name", ["halving-doubling", "tree", "pairwise"])
def test_a_picture_is_written(name: str, tmp_path: Path) -> None:
    picture(ALGORITHMS[name], 3, str(tmp_path / "steps.png"))
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_draws() -> None:
    done = typed("bench", "collectives", "--draw", "naive", "--ranks", "3", "--json")
    told = json.loads(done.stdout)
    assert told["steps"][0] == [
        {"from": 1, "to": 0, "chunks": [0], "adds": True},
        {"from": 2, "to": 0, "chunks": [0], "adds": True},
    ]
    assert told["sent"][0] == {"rank": 0, "messages": 2, "chunks": 2}
    assert "step 2" in typed("bench", "collectives", "--draw", "naive", "--ranks", "3").stdout


def test_what_cannot_be_drawn_is_refused() -> None:
    done = typed("bench", "collectives", "--draw", "rng", "--ranks", "40", "--png", "/nowhere/steps.png")
    assert done.exit_code == 2
    assert "--png" in done.stderr
    done = typed("bench", "collectives", "--draw", "rng", "--ranks", "40")
    assert done.exit_code == 2
    assert "'rng' is unknown" in done.stderr
    assert "Did you mean 'ring'?" in done.stderr
    assert "40 ranks cannot be drawn" in done.stderr
