"""Collectives written out, on marks: everyone's part arrives once, in the messages that the texts count."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.comm.algorithms import ALGORITHMS, chunk_sizes, held, power_within, sent_by

RANKS = range(1, 18)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", RANKS)
def test_everyone_ends_with_what_it_should_have(name: str, ranks: int) -> None:
    algorithm = ALGORITHMS[name]
    states = held(algorithm, ranks)
    first, last = states[0], states[-1]
    for rank in range(ranks):
        for chunk in algorithm.ends(rank, ranks):
            begun = [chunk in first[other] for other in range(ranks)]
            if algorithm.operation in ("all_gather", "all_to_all", "broadcast"):
                assert last[rank][chunk] == tuple(map(int, begun)), "the one that had it, unchanged"
            else:
                assert last[rank][chunk] == (1,) * ranks, "everyone's part, once"


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_message_has_one_sender_and_one_receiver_at_a_time(name: str, ranks: int) -> None:
    """And no rank sends two messages to another in a step: nothing could tell them apart."""
    for step in ALGORITHMS[name].steps(ranks):
        pairs = [(move.source, move.to) for move in step]
        assert len(set(pairs)) == len(pairs)
        assert all(source != to for source, to in pairs)


@pytest.mark.parametrize("ranks", range(2, 18))
def test_steps_and_bytes_are_those_of_the_texts(ranks: int) -> None:
    rounds = math.ceil(math.log2(ranks))

    def most(name: str) -> float:
        """Of the busiest rank, in tensors."""
        algorithm = ALGORITHMS[name]
        return max(chunks for _, chunks in sent_by(algorithm, ranks)) / algorithm.chunks(ranks)

    def steps(name: str) -> int:
        return len(ALGORITHMS[name].steps(ranks))

    assert most("naive") == ranks - 1
    assert (steps("naive"), steps("ring"), steps("tree")) == (2, 2 * (ranks - 1), 2 * rounds)
    assert most("ring") == pytest.approx(2 * (ranks - 1) / ranks)
    assert sent_by(ALGORITHMS["tree"], ranks)[0] == (rounds, rounds)
    power = power_within(ranks)
    best, few = 2 * (power - 1) / power, 2 * int(math.log2(power))
    if ranks == power:
        assert most("halving-doubling") == pytest.approx(best)
        assert steps("halving-doubling") == few
    else:
        assert most("halving-doubling") <= best + 1
        assert steps("halving-doubling") == few + 2


@given(elements=st.integers(0, 1000), chunks=st.integers(1, 40))
def test_chunks_are_all_of_a_tensor_and_none_is_larger_than_the_first(elements: int, chunks: int) -> None:
    sizes = chunk_sizes(elements, chunks)
    assert len(sizes) == chunks
    assert sum(sizes) == elements
    assert sizes[0] == math.ceil(elements / chunks)
    assert sizes == sorted(sizes, reverse=True)
