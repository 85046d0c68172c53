"""The texts' worked examples as they are told: figures, assumptions, and where data parallelism ends."""

from __future__ import annotations

from functools import cache

import pytest

from fivefold.planner.worked_examples import CASES, AllReduce, Ratio, ratio
from fivefold.report.worked_examples import (
    as_json,
    assumptions,
    first_line,
    header,
    rows,
    where_it_breaks_down,
)


@cache
def ratios() -> list[Ratio]:
    return [ratio(case) for case in CASES]


def test_the_example_of_one_all_reduce() -> None:
    assert "each sends 24.5 GB, in 0.49 s. Behind 2.0 s of computation: 80%" in first_line(AllReduce())


def test_a_column_for_each_case() -> None:
    table = {name: rest for name, *rest in rows(ratios())}
    assert header(ratios())[1:] == tuple(case.name for case in CASES)
    assert table["ratio"] == ["0.00044", "0.077", "1.3"]
    assert table["devices"] == ["dgx-a100, 1 server", "dgx-h100, 8 servers", "dgx-h100, 512 servers"]
    assert table["a replica holds"][0] == "121 GB of 86: does not fit"


def test_assumptions_are_printed() -> None:
    said = " ".join(assumptions(ratios()))
    assert "gradients of 16 bits" in said
    assert "40% of the dense peak (A100 SXM 80GB 312 TFLOP/s, H100 SXM 989.4 TFLOP/s)" in said


def test_where_data_parallelism_alone_breaks_down() -> None:
    memory, batch = where_it_breaks_down(ratios())
    assert "80 GiB hold at most 4.8B parameters, and none of these models fits" in memory
    assert "4,096 devices compute half of the time from 21.5M tokens a step on" in batch


def test_as_json() -> None:
    told = as_json(AllReduce(), ratios())
    assert told["all_reduce"]["seconds"] == pytest.approx(0.49)
    assert [one["devices"] for one in told["ratios"]] == [8, 64, 4096]
    assert "breaks down" in told["breaks_down"]
