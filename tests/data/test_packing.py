"""Packing: every token predicted once, documents told apart, held-out documents whole."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.data.batch import NOT_SCORED, collate
from fivefold.data.packing import Windows, split

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def stored(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Documents whose tokens are all different, so that a token tells where it is from."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return np.arange(offsets[-1], dtype=np.uint16) + 7, offsets


@given(sizes=lengths, heldout=st.floats(0.01, 0.49))
def test_split_is_a_partition_of_whole_documents(sizes: list[int], heldout: float) -> None:
    _, offsets = stored(sizes)
    train, held = split(offsets, heldout)
    if len(sizes) == 1:
        assert train[0, 0] == 0
        assert train[0, 1] == held[0, 0]
        assert held[0, 1] == sizes[0]
        assert held[0, 1] > held[0, 0]
        return
    assert len(train) >= 1
    assert len(held) >= 1
    spans = sorted(map(tuple, np.concatenate([train, held])))
    assert spans == list(pairwise(offsets))


def test_split_fraction_and_growth() -> None:
    offsets = np.arange(20_001, dtype=np.int64)
    small, large = (split(offsets, fraction)[1][:, 0] for fraction in (0.02, 0.1))
    assert 300 < len(small) < 500
    assert set(small) < set(large)


@given(sizes=lengths, seq_len=st.integers(1, 12), chosen=st.data())
def test_every_token_is_predicted_once_and_documents_are_right(
    sizes: list[int], seq_len: int, chosen: st.DataObject
) -> None:
    tokens, offsets = stored(sizes)
    keep = chosen.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)).filter(any))
    spans = np.stack([offsets[:-1], offsets[1:]], axis=1)[np.array(keep)]
    stream = np.concatenate([tokens[a:b] for a, b in spans]).astype(np.int64)
    owner = np.repeat(np.arange(len(spans)), spans[:, 1] - spans[:, 0])

    windows = Windows(tokens, spans, seq_len)
    samples = [windows.sample(index) for index in range(len(windows))]

    predicted = np.concatenate([sample.tokens[1:] for sample in samples]) if samples else np.empty(0)
    assert 0 <= len(stream) - 1 - len(predicted) < seq_len
    np.testing.assert_array_equal(predicted, stream[1 : 1 + len(predicted)])
    for index, sample in enumerate(samples):
        here = slice(index * seq_len, (index + 1) * seq_len + 1)
        np.testing.assert_array_equal(sample.tokens, stream[here])
        np.testing.assert_array_equal(sample.documents, owner[here] - owner[here][0])


@given(sizes=lengths, seq_len=st.integers(1, 12))
def test_the_end_of_a_document_has_no_target(sizes: list[int], seq_len: int) -> None:
    tokens, offsets = stored(sizes)
    windows = Windows(tokens, np.stack([offsets[:-1], offsets[1:]], axis=1), seq_len)
    if len(windows) == 0:
        return
    samples = [windows.sample(index) for index in range(len(windows))]
    last_tokens = set((tokens[offsets[1:] - 1]).tolist())

    apart = collate(samples, separate_documents=True)
    assert apart.documents is not None
    for token, target in zip(apart.tokens.flatten().tolist(), apart.targets.flatten().tolist(), strict=True):
        assert target == (NOT_SCORED if token in last_tokens else token + 1)
    assert apart.valid == int((apart.targets != NOT_SCORED).sum())
    assert apart.boundaries is not None
    begins = [
        row * seq_len + place
        for row, numbers in enumerate(apart.documents.tolist())
        for place, number in enumerate(numbers)
        if place == 0 or number != numbers[place - 1]
    ]
    found = apart.boundaries.tolist()
    assert found[: len(begins)] == begins, "a row begins a document, whatever its number"
    assert set(found[len(begins) :]) == {apart.tokens.numel()}

    together = collate(samples, separate_documents=False)
    assert together.documents is None
    assert together.valid == together.targets.numel()
    assert (together.targets == together.tokens + 1).all()
    assert (together.tokens == apart.tokens).all()


def test_batch_moves_whole() -> None:
    tokens, offsets = stored([5, 9, 4])
    windows = Windows(tokens, np.stack([offsets[:-1], offsets[1:]], axis=1), 4)
    batch = collate([windows.sample(0), windows.sample(1)], separate_documents=True)
    moved = batch.to("meta", non_blocking=True)
    assert moved.valid == batch.valid
    assert moved.documents is not None
    for tensor in (moved.tokens, moved.targets, moved.documents):
        assert tensor.device.type == "meta"
        assert tensor.shape == (2, 4)


@pytest.mark.parametrize(("tokens", "windows"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_number_of_windows(tokens: int, windows: int) -> None:
    assert len(Windows(np.zeros(tokens, np.uint16), np.array([[0, tokens]]), 4)) == windows


def test_the_held_out_documents_never_change() -> None:
    """Else a run that goes on under a later version would be validated on what it was trained on."""
    offsets = np.arange(101, dtype=np.int64)
    assert split(offsets, 0.05)[1][:, 0].tolist() == [9, 30, 32, 44, 59, 74, 98]
