"""Collectives timed by every algorithm: each is run, and what is told follows from the times."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fivefold.bench.collectives import OPERATIONS, Case, Timed, bus_factor, check, measure
from fivefold.comm.algorithms import ALGORITHMS
from fivefold.report.collectives import as_json, fits, picture, rows
from tests.commands.typed import typed

KIB = 1024


def test_every_algorithm_of_every_operation_is_timed() -> None:
    timed = measure(2, "cpu", seconds=1.0, sizes=(KIB, 4 * KIB))
    assert {each.case.operation for each in timed} == set(OPERATIONS)
    assert {each.case.algorithm for each in timed} == {"gloo", *ALGORITHMS}
    for each in timed:
        assert list(each.seconds) == [KIB, 4 * KIB]
        assert min(each.seconds.values()) > 0


def example() -> Timed:
    return Timed(Case("all_reduce", "ring"), 4, {KIB: 1e-3, 4 * KIB: 2e-3}, 5e-4, 2e6, 0.05)


def test_bandwidths_are_those_of_the_convention() -> None:
    """As NCCL's tests have it: of an all-reduce a rank sends 2 (P - 1) / P, of a gather half of that."""
    assert [bus_factor(name, 4) for name in ("all_reduce", "all_gather", "broadcast")] == [1.5, 0.75, 1.0]
    assert example().algorithm_bandwidth(4 * KIB) == pytest.approx(2 * KIB * 1e3)
    assert example().bus_bandwidth(4 * KIB) == pytest.approx(3 * KIB * 1e3)


def test_what_is_told(tmp_path: Any) -> None:
    assert rows([example()])[1] == ("all_reduce", "ring", "4 KiB", "2.00 ms", "0.00205", "0.00307")
    assert fits([example()]) == [("all_reduce", "ring", "500 us", "0.002", "5%")]
    told = as_json([example()], "gloo")
    assert told["collectives"][0]["fit"] == {"latency": 5e-4, "bandwidth": 2e6, "error": 0.05}
    picture([example()], "4 ranks", str(tmp_path / "times.png"))
    assert (tmp_path / "times.png").exists()


def test_the_command_measures() -> None:
    done = typed("bench", "collectives", "--ranks", "2", "--operation", "reduce", "--seconds", "1", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["backend"], told["ranks"]) == ("gloo", 2)
    assert [each["algorithm"] for each in told["collectives"]] == ["gloo", "tree-reduce"]


def test_what_cannot_be_measured_is_refused() -> None:
    said = "\n".join(map(str, check(1, "cpu", "all_reducer", "/nowhere/times.png")))
    assert "1 has nobody to send to" in said
    assert "Did you mean 'all_reduce'?" in said
    assert "there is no folder" in said
    assert "this machine has 0 GPU(s)" in str(check(2, "cuda", None, None)[0])
