"""A job as words of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config import as_words, load

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_read_back_as_it_was(path):
    job = load(str(path))
    assert load(None, None, as_words(job)) == job


def test_text_stands_as_it_is_typed_where_it_is_read_so():
    words = ["--run.name=7", '--data.source=["a.txt", {path = "b c", weight = 2}]', "--training.steps=3"]
    job = load(None, "tiny", words)
    assert load(None, None, as_words(job)) == job
    assert "--run.name=7" in as_words(job)
    assert "--model.preset=tiny" in as_words(job)
