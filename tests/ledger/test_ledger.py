"""The ledger's arithmetic: bytes on the wire against a ring that is really run, sums and tallies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.ledger.ledger import Held, Ledger, Message, Operation, joined, sent
from fivefold.ledger.precision import PRECISIONS, precision_named
from fivefold.ledger.setup import Figure, Setup
from fivefold.models.presets import PRESETS

# --- a ring, run by hand -----------------------------------------------------------------------------------


class Ring:
    """Ranks in a circle, each holding one number per chunk; counts the chunks that each sends."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.held = [[float(10**rank * (chunk + 1)) for chunk in range(ranks)] for rank in range(ranks)]
        self.sent = [0] * ranks
        self.total = [sum(row[chunk] for row in self.held) for chunk in range(ranks)]

    def _turn(self, offset: int, turn: int, add: bool) -> None:
        """Every rank sends one chunk to its right neighbour, all at once."""
        going = [(rank, (rank + offset - turn) % self.ranks) for rank in range(self.ranks)]
        flying = [(rank, chunk, self.held[rank][chunk]) for rank, chunk in going]
        for rank, chunk, value in flying:
            self.sent[rank] += 1
            neighbour = self.held[(rank + 1) % self.ranks]
            neighbour[chunk] = neighbour[chunk] + value if add else value

    def reduce_scatter(self) -> None:
        """Rank r ends with the sum of chunk r + 1."""
        for turn in range(self.ranks - 1):
            self._turn(0, turn, add=True)

    def all_gather(self) -> None:
        """Rank r's chunk r + 1 ends on every rank."""
        for turn in range(self.ranks - 1):
            self._turn(1, turn, add=False)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_bytes_on_the_wire_are_those_of_a_ring(ranks: int) -> None:
    chunk = 24
    ring = Ring(ranks)
    ring.reduce_scatter()
    assert [ring.held[rank][(rank + 1) % ranks] for rank in range(ranks)] == [
        pytest.approx(ring.total[(rank + 1) % ranks]) for rank in range(ranks)
    ]
    scattering = list(ring.sent)
    ring.all_gather()
    assert all(row == pytest.approx(ring.total) for row in ring.held)
    gathering = [after - before for after, before in zip(ring.sent, scattering, strict=True)]

    def wire(operation: Operation) -> Figure:
        return Message(operation, chunk * ranks, "dp_shard", ranks, 1, "backward").wire_bytes

    for rank in range(ranks):
        assert wire("reduce_scatter") == scattering[rank] * chunk
        assert wire("all_gather") == gathering[rank] * chunk
        assert wire("all_reduce") == ring.sent[rank] * chunk == 2 * (ranks - 1) * chunk


# --- sums --------------------------------------------------------------------------------------------------


def message(operation: Operation, payload: int, count: int, ranks: int = 2) -> Message:
    return Message(operation, payload, "dp_shard", ranks, count, "backward")


def test_lines_add_up_by_role() -> None:
    held = Held("weights", "a", 10, 30), Held("states", "b", 5, 5), Held("weights", "c", 1, 2)
    ledger = Ledger(held)
    assert (ledger.rest("weights"), ledger.peak("weights")) == (11, 32)
    assert (ledger.rest("states"), ledger.rest("gradients")) == (5, 0)


def test_messages_are_not_changed_by_sending_them() -> None:
    alone = message("all_reduce", 8, 1, ranks=1)
    assert sent([alone]) == ()
    assert alone == message("all_reduce", 8, 1, ranks=1)


def test_groups_of_one_and_counts_of_none_send_nothing() -> None:
    ledger = Ledger(messages=sent([message("all_gather", 8, 1, ranks=1), message("all_gather", 8, 0)]))
    assert ledger.messages == ()
    assert ledger.wire_bytes == 0


def test_traffic_adds_equal_messages_of_different_lines() -> None:
    lines = message("all_gather", 8, 2), message("all_gather", 8, 3), message("all_reduce", 8, 1)
    ledger = Ledger(messages=sent(lines))
    assert ledger.traffic() == {("all_gather", 8, "dp_shard"): 5, ("all_reduce", 8, "dp_shard"): 1}
    assert ledger.wire_bytes == 5 * 4 + 8


def test_between_two_ranks_the_sender_counts_the_bytes() -> None:
    """Over all ranks of a pipeline each message is on the wire once."""
    first, second = (Ledger(messages=(message(way, 8, 3),)) for way in ("send", "recv"))
    assert first.wire_bytes + second.wire_bytes == first.wire_bytes == 3 * 8


def test_what_is_sent_together_has_all_bytes_of_its_lines() -> None:
    together = [replace(message("all_reduce", size, count), joins=True) for size, count in ((8, 3), (2, 5))]
    alone, of_others = message("all_reduce", 64, 2), replace(together[0], group="tp")
    found = Ledger(messages=tuple(joined([*together, alone, of_others])))
    assert found.traffic() == {
        ("all_reduce", 64, "dp_shard"): 2,
        ("all_reduce", 3 * 8 + 5 * 2, "dp_shard"): 1,
        ("all_reduce", 3 * 8, "tp"): 1,
    }


LINES = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "all_gather"]),
        st.sampled_from([8, 16]),
        st.sampled_from(["dp_shard", "dp_replicate"]),
        st.integers(1, 5),
    )
)


@given(LINES)
def test_traffic_counts_each_line_as_often_as_it_says(lines: list[tuple[Operation, int, str, int]]) -> None:
    messages = [Message(*line[:3], 2, line[3], "forward") for line in lines]
    expected = Counter(line[:3] for line in lines for _ in range(line[3]))
    assert Ledger(messages=sent(messages)).traffic() == expected


# --- what an optimizer keeps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "momentum", "ema", "precision", "bytes_each"),
    [
        ("adamw", 0.9, False, "bf16", 8),
        ("adamw", 0.9, True, "fp32", 12),
        ("adamw", 0.9, False, "fp64", 16),
        ("sgd", 0.9, False, "fp16", 4),
        ("sgd", 0.0, False, "fp32", 0),
        ("sgd", 0.0, True, "fp32", 4),
    ],
)
def test_moments(name: str, momentum: float, ema: bool, precision: str, bytes_each: int) -> None:
    settings: dict[str, Any] = {"optimizer": name, "momentum": momentum, "ema": ema}
    setup = Setup(PRESETS["tiny"], 16, 8, PRECISIONS[precision], **settings)
    assert setup.moment_bytes(10) == 10 * bytes_each


@pytest.mark.parametrize(("states", "bytes_each"), [("bf16", 4), ("int8", 2)])
@pytest.mark.parametrize("ema", [False, True])
def test_moments_in_fewer_bits_beside_an_average_in_32(states: str, bytes_each: int, ema: bool) -> None:
    setup = Setup(PRESETS["tiny"], 16, 8, PRECISIONS["fp32"], states=states, ema=ema)
    assert setup.moment_bytes(10) == 10 * (bytes_each + 4 * ema)


@pytest.mark.parametrize(("states", "pair", "one"), [("fp32", 8, 4), ("bf16", 4, 2), ("int8", 2, 2)])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_muons_momentum_is_never_in_8_bits(states: str, pair: int, one: int, momentum: float) -> None:
    """Where it is rounded, updates are counted for it too."""
    settings: dict[str, Any] = {"optimizer": "muon", "states": states, "momentum": momentum}
    setup = Setup(PRESETS["tiny"], 16, 8, PRECISIONS["bf16"], **settings)
    assert setup.moment_bytes(10, 7) == 3 * pair + 7 * one * (momentum > 0)
    assert setup.counter_bytes(5, 2) == 4 * (5 if states != "fp32" and momentum else 3)


def test_an_open_precision_has_no_bytes() -> None:
    with pytest.raises(ValueError, match="resolve"):
        precision_named(None)
