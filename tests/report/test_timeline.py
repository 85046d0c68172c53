"""Timelines as text, trace and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.problems import BadInput
from fivefold.report.shown import Shown
from fivefold.report.simulated_schedule import schedule_shown
from fivefold.report.timeline import as_text, as_trace, write_trace


def shown(schedule: str, ranks: int, count: int, **more: Any) -> Shown:
    options = {
        "--stages": ranks,
        "--micro-batches": count,
        "--virtual-stages": None,
        "--forward": "2",
        "--backward-input": "2",
        "--backward-weight": "2",
        "--transfer": None,
    }
    return schedule_shown(schedule, options | more)


def test_text() -> None:
    # Names and frames take 9 characters, 18 ms of time the other 36.
    text = as_text(shown("gpipe", 2, 2), width=9 + 36)
    assert text.splitlines() == [
        "rank 0 ▕F0──F1──············B0──────B1──────▏",
        "rank 1 ▕····F0──F1──B0──────B1──────········▏",
    ]


def test_every_line_has_the_same_width() -> None:
    for width in (20, 61, 200):
        for schedule in ("1f1b", "zb-h2", "interleaved"):
            lines = as_text(shown(schedule, 4, 8), width).splitlines()
            assert {len(line) for line in lines} == {max(width, 6 + 3 + 10)}


def test_colours_change_nothing_else() -> None:
    import re

    plain = as_text(shown("zb-h1", 3, 6), 100)
    coloured = as_text(shown("zb-h1", 3, 6), 100, colours=True)
    assert coloured != plain
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain


def test_trace(tmp_path: Path) -> None:
    what = shown("zb-h1", 3, 6, **{"--transfer": 0.5})
    write_trace(what, str(tmp_path / "trace.json"))
    lines = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [line for line in lines if line["ph"] == "X"]
    assert len(slices) == 3 * 3 * 6
    assert [line["dur"] for line in slices] == pytest.approx([2000.0] * len(slices))
    assert max(line["ts"] + line["dur"] for line in slices) == pytest.approx(what.figures["makespan"] * 1000)
    names = {line["args"]["name"] for line in lines if line["name"] == "thread_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    starts = {line["id"]: line for line in lines if line["ph"] == "s"}
    ends = {line["id"]: line for line in lines if line["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 2 * 6  # over two boundaries, there and back
    assert all(ends[number]["ts"] >= starts[number]["ts"] + 500 - 1e-6 for number in starts)
    levels = [line["args"]["micro-batches in flight"] for line in lines if line["ph"] == "C"]
    assert max(levels) == 3
    assert min(levels) == 0


def test_stages_of_one_rank_have_no_arrow_between_them() -> None:
    lines = as_trace(shown("zbv", 2, 4))["traceEvents"]
    # Stages 0 and 3 are on the first rank, 1 and 2 on the second: two boundaries of three are crossed.
    assert sum(line["ph"] == "s" for line in lines) == 2 * 2 * 4


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from fivefold.report.timeline_picture import draw

    draw(shown("zb-h2", 3, 6), str(tmp_path / "step.png"))
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BadInput, match="cannot write"):
        draw(shown("1f1b", 3, 6), str(tmp_path / "step.unknown"))
    with pytest.raises(BadInput, match="cannot write"):
        draw(shown("1f1b", 3, 6), str(tmp_path / "nowhere" / "step.png"))


def test_a_trace_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot write"):
        write_trace(shown("1f1b", 2, 2), str(tmp_path / "nowhere" / "trace.json"))
