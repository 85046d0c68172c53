"""Sample order: a permutation each epoch, a mix in the right shares, and nothing but (seed, number) in it."""

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fivefold.data.order import LONGEST_CYCLE, Order, permute, slots
from fivefold.problems import BadInput

seeds = st.integers(0, 2**63)
weights_of_sources = st.integers(1, 9).map(float) | st.floats(0.05, 20).map(lambda w: round(w, 2))
mixes = st.lists(st.tuples(st.integers(1, 40), weights_of_sources), min_size=2, max_size=4)


@given(size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(number, size, key) for number in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_permutation_of_a_small_set_is_about_equally_likely(size: int) -> None:
    draws = 3000
    seen = Counter(tuple(permute(n, size, key * 7919) for n in range(size)) for key in range(draws))
    orders = list(permutations(range(size)))
    assert set(seen) == set(orders)
    assert min(seen.values()) > 0.5 * draws / len(orders)


def test_neighbours_do_not_stay_neighbours() -> None:
    size = 10_000
    places = [permute(number, size, 5) for number in range(size)]
    close = sum(abs(a - b) < 100 for a, b in pairwise(places))
    assert close < 400  # 200 expected of a random order


@given(size=st.integers(1, 60), seed=seeds, epoch=st.integers(0, 1000))
def test_one_source_every_sample_once_an_epoch(size: int, seed: int, epoch: int) -> None:
    order = Order([size], [1.0], seed)
    numbers = range(epoch * size, (epoch + 1) * size)
    assert sorted(order.locate(number) for number in numbers) == [(0, index) for index in range(size)]


@given(seed=seeds, size=st.just(50) | st.just(3000))
@settings(max_examples=20)
def test_no_two_epochs_are_alike_and_no_two_seeds(seed: int, size: int) -> None:
    order, other = Order([size], [1.0], seed), Order([size], [1.0], seed + 1)
    begins = [tuple(order.locate(epoch * size + n) for n in range(12)) for epoch in range(40)]
    begins += [tuple(other.locate(n) for n in range(12)), tuple((0, n) for n in range(12))]
    assert len(set(begins)) == len(begins)


@given(seed=seeds)
def test_seeds_mix_otherwise(seed: int) -> None:
    one, other = (Order([9, 9], [1, 1.01], each) for each in (seed, seed + 1))
    assert [one.locate(n)[0] for n in range(100)] != [other.locate(n)[0] for n in range(100)]


@given(mix=mixes, seed=seeds, numbers=st.lists(st.integers(0, 10**12), max_size=20))
def test_locate_is_pure(mix: list[tuple[int, float]], seed: int, numbers: list[int]) -> None:
    sizes, weights = zip(*mix, strict=True)
    forwards = [Order(sizes, weights, seed).locate(number) for number in numbers]
    one = Order(sizes, weights, seed)
    assert [one.locate(number) for number in reversed(numbers)] == forwards[::-1]


@given(weights=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=8))
def test_slots_are_within_one_of_the_weights(weights: list[float]) -> None:
    try:
        counts = slots(weights)
    except BadInput:
        assert min(weights) / sum(weights) < 1 / LONGEST_CYCLE
        return
    cycle = sum(counts)
    assert cycle <= LONGEST_CYCLE
    for weight, count in zip(weights, counts, strict=True):
        assert abs(weight / sum(weights) * cycle - count) < 1 + 1e-6


def test_slots_are_exact_where_they_can_be() -> None:
    assert slots([1.0]) == (1,)
    assert slots([1, 3]) == (1, 3)
    assert slots([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert sum(slots([1, 3.14159265])) == LONGEST_CYCLE


@given(mix=mixes, seed=seeds)
@example(mix=[(40, 1.0), (30, 2.0)], seed=0)
@settings(max_examples=50, deadline=None)
def test_the_nth_sample_of_a_source_counts_that_sources_slots_alone(
    mix: list[tuple[int, float]], seed: int
) -> None:
    """Against plain counting: each source goes through its epochs as it would alone."""
    sizes, weights = zip(*mix, strict=True)
    order = Order(sizes, weights, seed)
    drawn: list[list[int]] = [[] for _ in sizes]
    cycle = sum(order.counts)
    length = 20 * cycle if cycle <= 100 else min(2 * cycle, 200)
    for number in range(length):
        source, index = order.locate(number)
        drawn[source].append(index)
    for indices, size in zip(drawn, sizes, strict=True):
        for epoch in range(len(indices) // size):
            assert sorted(indices[epoch * size : (epoch + 1) * size]) == list(range(size))
        rest = indices[len(indices) // size * size :]
        assert len(set(rest)) == len(rest)
    if length % cycle == 0:
        assert [len(indices) for indices in drawn] == [length // cycle * count for count in order.counts]


def test_cycles_of_the_mix_differ() -> None:
    order = Order([1000, 1000], [1, 9], 0)
    cycles = [tuple(order.locate(c * 10 + i)[0] for i in range(10)) for c in range(30)]
    assert all(sum(cycle) == 9 for cycle in cycles)
    assert len(set(cycles)) > 5


@pytest.mark.parametrize("weights", [[1, 0], [1, -1], [1, float("inf")], [1, float("nan")]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(BadInput, match="number above 0"):
        slots(weights)


def test_a_weight_too_small_to_be_seen() -> None:
    with pytest.raises(BadInput, match=r"weight 1e-07 \(source 2\)"):
        slots([1, 1e-7])


def test_the_order_never_changes() -> None:
    """A run that goes on under a later version must go on with the samples it has not seen."""
    assert [Order([10], [1.0], 0).locate(n)[1] for n in range(10, 20)] == [7, 8, 5, 1, 0, 4, 9, 6, 2, 3]
    assert [Order([10, 5], [2, 1], 7).locate(n) for n in range(6)] == [
        (1, 2),
        (0, 9),
        (0, 5),
        (0, 8),
        (1, 4),
        (0, 4),
    ]
