"""The `random` source."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fivefold.data.synthetic import RandomTokens


@given(key=st.integers(0, 2**64 - 1), index=st.integers(0, 2**48 - 1), vocab_size=st.integers(1, 200_000))
def test_a_sample_is_a_function_of_its_key_and_number(key: int, index: int, vocab_size: int) -> None:
    first, again = (RandomTokens(key, 32, vocab_size).sample(index) for _ in range(2))
    assert np.array_equal(first.tokens, again.tokens)
    assert first.tokens.shape == (33,)
    assert first.tokens.dtype == first.documents.dtype == np.int64
    assert 0 <= first.tokens.min() <= first.tokens.max() < vocab_size
    assert not first.documents.any()


def test_the_tokens_are_the_same_on_every_machine() -> None:
    assert RandomTokens(1, 5, 1000).sample(2).tokens.tolist() == [377, 50, 683, 234, 763, 984]


def test_keys_and_numbers_differ() -> None:
    samples = [RandomTokens(key, 50, 1000).sample(index).tokens for key in range(4) for index in range(4)]
    assert len({tuple(tokens) for tokens in samples}) == 16


def test_uniform_over_the_vocabulary() -> None:
    tokens = np.concatenate([RandomTokens(3, 999, 10).sample(index).tokens for index in range(20)])
    counts = np.bincount(tokens, minlength=10)
    assert counts.min() > 1800
    assert counts.max() < 2200


def test_documents_of_a_mean_length() -> None:
    samples = [RandomTokens(3, 999, 10, document_length=20).sample(index) for index in range(20)]
    for sample in samples:
        assert sample.documents[0] == 0
        assert set(np.diff(sample.documents)) == {0, 1}
    assert 45 < np.mean([sample.documents[-1] for sample in samples]) < 55
