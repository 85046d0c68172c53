"""The texts' worked examples, by hand and by the functions that plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fivefold.models.inventory import parameter_count
from fivefold.models.presets import PRESETS
from fivefold.planner.worked_examples import CASES, AllReduce, Ratio, gradients, ratio


@cache
def ratios() -> list[Ratio]:
    return [ratio(case) for case in CASES]


def test_14_gb_over_8_ranks_at_50_gb_a_second_take_half_a_second() -> None:
    example = AllReduce()
    assert (example.payload, example.devices, example.bandwidth) == (14e9, 8, 50e9)
    assert example.seconds == pytest.approx(2 * 7 / 8 * 14e9 / 50e9) == pytest.approx(0.49)
    assert example.efficiency == pytest.approx(0.80, abs=0.005)


def test_the_three_cases_are_those_of_the_texts() -> None:
    sizes = [parameter_count(PRESETS[case.model]) / 1e9 for case in CASES]
    assert sizes == pytest.approx([7, 70, 1000], rel=0.05)
    assert [case.devices for case in CASES] == [8, 64, 4096]
    assert [one.servers for one in ratios()] == [1, 8, 512]
    assert [one.link.bandwidth / 1e9 for one in ratios()] == [300, 50, 50]  # NVLink each way, 400 Gb/s


def test_ratios_of_communication_to_computation() -> None:
    """By hand: 2 (P-1)/P x 2 bytes x N / link, over 6 N x tokens / (40% of the peak), attention left out.

    N cancels out: 7B on 8 A100s 0.00046, 70B on 64 H100s 0.079, 1T on 4,096 H100s 1.29.
    """
    peaks = [312e12, 989.4e12, 989.4e12]
    by_hand = [
        (2 * (case.devices - 1) / case.devices * 2 / one.link.bandwidth)
        / (6 * case.batch / case.devices / (0.4 * peak))
        for case, one, peak in zip(CASES, ratios(), peaks, strict=True)
    ]
    assert by_hand == pytest.approx([0.000463, 0.0793, 1.288], rel=0.003)
    assert [one.ratio for one in ratios()] == pytest.approx(by_hand, rel=0.1)
    assert [one.ratio for one in ratios()] == pytest.approx([0.000437, 0.0766, 1.28], rel=0.003)


def test_as_planned_all_adapters_of_a_server_send_at_once() -> None:
    """8 to a server, each at 50 GB/s, less what crowding and the library take; inside of one, its share."""
    inside, few, many = (one.communication / one.planned for one in ratios())
    assert inside == pytest.approx(0.8, abs=0.01)
    assert 3 < many < few < 8


def test_the_ratio_falls_with_the_batch_and_is_1_at_the_even_one() -> None:
    last = ratios()[-1]
    twice = ratio(replace(last.case, batch=2 * last.case.batch))
    assert twice.ratio == pytest.approx(last.ratio / 2)
    assert twice.even_batch == pytest.approx(last.even_batch) == pytest.approx(last.ratio * last.case.batch)


def test_where_data_parallelism_alone_breaks_down() -> None:
    """No replica fits into 80 GiB; and 4,096 devices would need a larger batch than anybody's."""
    assert not any(one.fits for one in ratios())
    assert [one.held / one.parameters for one in ratios()] == pytest.approx([18, 18, 18], rel=0.001)
    assert ratios()[-1].even_batch > ratios()[-1].case.batch
    assert all(one.even_batch < one.case.batch for one in ratios()[:-1])
    assert ratios()[0].largest / 1e9 == pytest.approx(4.77, abs=0.01)


def test_gradients_are_one_message_of_a_ring() -> None:
    assert gradients(8e9, 4).wire_bytes == 2 * 3 / 4 * 8e9
