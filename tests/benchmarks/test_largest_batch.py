"""The largest batch that fits is found, in few tries."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.largest_batch import MOST, following, largest, setting_of
from benchmarks.largest_batch import main as command
from benchmarks.trained import DoesNotFitError, Steady
from fivefold.problems import BadInput


class Card:
    """Memory that grows by `each` a sequence over `base`, up to `limit`."""

    def __init__(self, base: float, each: float, limit: float):
        self.base, self.each, self.limit = base, each, limit
        self.tries: list[int] = []

    def __call__(self, size: int) -> Steady:
        self.tries.append(size)
        needed = self.base + self.each * size
        if needed > self.limit:
            raise DoesNotFitError
        return Steady(1.0, 1.0, needed)


@given(
    base=st.floats(0, 120),
    each=st.floats(0.4, 60),
    limit=st.floats(100, 140),
    first=st.integers(1, 64),
    memory=st.sampled_from([None, 140.0, 70.0, 300.0]),
)
def test_the_largest_that_fits_is_found(base, each, limit, first, memory):
    """Whatever the card is said to have: `memory` only says where to look."""
    card = Card(base, each, limit)
    found = largest(card, first, MOST, memory)
    fits = [size for size in range(1, MOST + 1) if base + each * size <= limit]
    assert max(found, default=0) == max(fits, default=0)
    assert len(set(card.tries)) == len(card.tries)


def test_a_line_through_two_peaks_saves_tries():
    card = Card(20.0, 11.8, 138.0)  # 10 fit
    assert list(largest(card, 2, MOST, 140.0)) == [2, 4, 9, 10]
    assert card.tries == [2, 4, 9, 10, 11]


def test_no_more_is_tried_than_may_be():
    card = Card(0.0, 0.0, 1.0)
    assert max(largest(card, 2, 12, None)) == 12
    assert card.tries == [2, 4, 8, 12]
    assert following({}, 1, 12, None) == 1


def test_a_case_of_ones_own():
    assert setting_of("loss alone: training.loss_chunk=1024 optimizer.states=bf16") == (
        "loss alone",
        {"training.loss_chunk": "1024", "optimizer.states": "bf16"},
    )


@pytest.mark.parametrize("text", ["", "loss", "loss:", ": a=1", "loss: a", "loss: a="])
def test_a_case_that_is_none_is_refused(text):
    with pytest.raises(BadInput, match="is no case"):
        setting_of(text)


@pytest.mark.slow
def test_it_runs_on_any_machine(tmp_path, capsys, monkeypatch):
    file = tmp_path / "out.json"
    words = ["", "--small", "--first", "1", "--most", "1", "--steps", "2", "--json", str(file)]
    monkeypatch.setattr("sys.argv", words)
    assert command() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["before", "1"], ["after", "1"]]
    figures = json.loads(Path(file).read_text())
    assert figures["cases"]["after"]["fitted"]["1"]["tokens_per_s"] > 0
