"""Collectives timed by every algorithm: each is run, and what is told follows from the times."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fivefold.bench.collectives import OPERATIONS, Case, Timed, bus_factor, check, measure, sizes_in
from fivefold.comm.algorithms import ALGORITHMS, sent_by
from fivefold.problems import BadInput
from fivefold.report.collectives import as_json, fits, picture, rows
from tests.commands.typed import typed

KIB = 1024


def busiest(algorithm: str, ranks: int) -> float:
    """Tensors that the busiest rank sends, counted in the algorithm's list of moves."""
    chosen = ALGORITHMS[algorithm]
    chunks = chosen.chunks(ranks) // (ranks if chosen.operation == "all_to_all" else 1)
    return max(sent for _, sent in sent_by(chosen, ranks)) / chunks


def test_every_algorithm_of_every_operation_is_timed_and_traced() -> None:
    timed = measure(3, "cpu", seconds=1.0, sizes=(KIB, 4 * KIB))
    assert {each.case.operation for each in timed} == set(OPERATIONS)
    assert {each.case.algorithm for each in timed} == {"gloo", *ALGORITHMS}
    for each in timed:
        assert list(each.seconds) == [KIB, 4 * KIB]
        assert min(each.seconds.values()) > 0
        if each.case.algorithm == "gloo":
            assert each.sent == {}  # it sends from inside
        else:
            assert set(each.sent) == {KIB, 4 * KIB}
            assert list(each.sent.values()) == pytest.approx([busiest(each.case.algorithm, 3)] * 2)


@pytest.mark.slow
def test_a_ring_of_8_sends_1_75_tensors_of_64_mb_and_the_root_of_the_naive_one_7() -> None:
    timed = measure(8, "cpu", "all_reduce", seconds=1.0, sizes=sizes_in("64MB"))
    sent = {each.case.algorithm: each.sent.get(64 * 10**6) for each in timed}
    assert sent == {"gloo": None, "naive": 7.0, "ring": 1.75, "tree": 3.0, "halving-doubling": 1.75}


def example() -> Timed:
    sent = {KIB: 1.5, 4 * KIB: 1.5}
    return Timed(Case("all_reduce", "ring"), 4, {KIB: 1e-3, 4 * KIB: 2e-3}, 5e-4, 2e6, 0.05, sent)


def test_bandwidths_are_those_of_the_convention() -> None:
    """As NCCL's tests have it: of an all-reduce a rank sends 2 (P - 1) / P, of a gather half of that."""
    assert [bus_factor(name, 4) for name in ("all_reduce", "all_gather", "broadcast")] == [1.5, 0.75, 1.0]
    assert example().algorithm_bandwidth(4 * KIB) == pytest.approx(2 * KIB * 1e3)
    assert example().bus_bandwidth(4 * KIB) == pytest.approx(3 * KIB * 1e3)


def test_what_is_told(tmp_path: Any) -> None:
    assert rows([example()])[1] == ("all_reduce", "ring", "4 KiB", "2.00 ms", "0.00205", "0.00307", "1.5 x")
    assert fits([example()]) == [("all_reduce", "ring", "500 us", "0.002", "5%")]
    told = as_json([example()], "gloo")
    assert told["collectives"][0]["fit"] == {"latency": 5e-4, "bandwidth": 2e6, "error": 0.05}
    assert told["collectives"][0]["sizes"][1]["busiest_rank_sends"] == 1.5
    picture([example()], "4 ranks", str(tmp_path / "times.png"))
    assert (tmp_path / "times.png").exists()


def test_one_size_is_not_fitted() -> None:
    one = Timed(Case("all_reduce", "gloo"), 4, {64 * 10**6: 1.0}, 1e-9, 64e6, 0.0)
    assert fits([one]) == []
    assert as_json([one], "gloo")["collectives"][0]["fit"] is None
    assert rows([one])[0][2:4] == ("64 MB", "1.00 s")
    assert rows([one])[0][-1] == ""


def test_sizes_as_people_write_them() -> None:
    assert sizes_in("512,64KiB, 64MB,1 gib,64mb") == (512, 64 * KIB, 64 * 10**6, 2**30)
    for wrong in ("64XB", "", "0", "-1", "1.5MB", "1,,2"):
        with pytest.raises(BadInput, match="is no size"):
            sizes_in(wrong)


def test_the_command_measures() -> None:
    words = ("--ranks", "2", "--operation", "reduce", "--sizes", "1KiB,64KB", "--seconds", "1")
    done = typed("bench", "collectives", *words, "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["backend"], told["ranks"]) == ("gloo", 2)
    assert [each["algorithm"] for each in told["collectives"]] == ["gloo", "tree-reduce"]
    assert [size["bytes"] for size in told["collectives"][1]["sizes"]] == [1024, 64000]
    assert [size["busiest_rank_sends"] for size in told["collectives"][1]["sizes"]] == [1.0, 1.0]


def test_what_cannot_be_measured_is_refused() -> None:
    said = "\n".join(map(str, check(1, "cpu", "all_reducer")))
    assert "1 has nobody to send to" in said
    assert "Did you mean 'all_reduce'?" in said
    assert "this machine has 0 GPU(s)" in str(check(2, "cuda")[0])
    assert "8 bytes cannot be dealt to 4 ranks" in str(check(4, "cpu", sizes=(8, KIB))[0])
    assert "is more than is free" in str(check(4, "cpu", sizes=(KIB, 2**60))[0])
