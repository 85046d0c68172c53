"""Messages part by part and of many layouts at once: the same as one rank's account of one job."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.axes import expert
from fivefold.axes.checks import check
from fivefold.axes.layout import EXPERT_REPLICAS, REPLICAS, Layout, Place, name_in
from fivefold.axes.messages import Traffic, block_messages, spelled
from fivefold.axes.pieces import PARTS, part_sizes, pieces, size_of
from fivefold.axes.runtime.zigzag import local_part
from fivefold.axes.stages import rank_of, stages, stages_of
from fivefold.config import Job, resolve
from fivefold.ledger.ledger import Message, joined, repeated, sent
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup, segment_length
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput
from fivefold.replay.account import account
from tests.axes.layouts import SCHEDULES, SPECS
from tests.axes.make_covering import MODES, drawn

# --- jobs --------------------------------------------------------------------------------------------------


def small_jobs(count: int) -> list[Job]:
    """Of experts, those that a term of the loss balances: parts know no other."""
    every = drawn(2 * count, seed=17, most=64)
    return [one.case().job() for one in every if ("balance", "bias") not in one.training][:count]


LARGE_MODELS: tuple[dict[str, Any], ...] = (
    {"preset": "llama3-8b"},
    {"preset": "gpt2-xl", "layers": 14},
    {"preset": "llama3-405b", "layers": 13},
    {"preset": "mixtral-8x7b", "layers": 12},
)


def large_jobs(count: int) -> Iterator[Job]:
    """Layouts of up to 512 ranks for real models, drawn at random; what is impossible is drawn again."""
    draw = random.Random(5)
    while count:
        layout: dict[str, Any] = {
            "dp_replicate": draw.choice((1, 1, 2, 4)),
            "dp_shard": draw.choice((1, 2, 8, 24)),
            "cp": draw.choice((1, 1, 2, 4)),
            "tp": draw.choice((1, 2, 4, 8)),
            "pp": draw.choice((1, 1, 2, 4)),
            "zero": draw.choice((0, 1, 2, 3)),
            "sequence_parallel": draw.random() < 0.8,
        }
        ranks = math.prod(layout[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
        if layout["pp"] > 1:
            layout["schedule"] = draw.choice(SCHEDULES)
            if layout["schedule"] in ("interleaved", "looped-bfs", "zero-bubble"):
                layout["virtual_stages"] = draw.choice((2, 3))
        if layout["cp"] > 1:
            layout["cp_kind"] = draw.choice(("ring", "ulysses", "allgather"))
        layout["ep"] = draw.choice((1, 2, 8))
        if layout["zero"] > 1 and draw.random() < 0.3:
            layout["reduce"] = "step"
        micro = draw.choice((1, 2))
        data_ranks = layout["dp_replicate"] * layout["dp_shard"]
        job = Job.model_validate(
            {
                "model": draw.choice(LARGE_MODELS),
                "training": {
                    "seq_len": 1024,
                    "micro_batch": micro,
                    "global_batch": micro * data_ranks * draw.choice((4, 8, 9)),
                    "recompute": draw.choice((*MODES, "every-3", "sqrt")),
                    "precision": draw.choice(("bf16", "fp32")),
                },
                "layout": layout,
                "data": {"source": "random"},
            }
        )
        if ranks > 512:
            continue
        try:
            job = resolve(job, ranks)
        except BadInput:
            continue
        if not check(job):
            count -= 1
            yield job


SMALL, LARGE = 120, 60


@cache
def jobs() -> list[Job]:
    return [*small_jobs(SMALL), *large_jobs(LARGE)]


# --- a rank put together from parts ------------------------------------------------------------------------


def rank_messages(job: Job, place: Place) -> list[Message]:
    """The messages of a step of the rank at `place`: `Traffic` over the parts of its stages."""
    setup, cut = Setup.of(job), stages(job)
    parts, found, repeats = Traffic(setup), list[Message](), setup.micro_batches
    found += parts.step
    for number in stages_of(job, place.pp):
        names = cut[number]
        blocks = sum(name.startswith("blocks.") for name in names)
        segments = math.ceil(blocks / (segment_length(setup.recompute, blocks) or 1))
        found += repeated(parts.block, segments * repeats)
        inner = sent(block_messages(setup, closes_segment=False))
        found += repeated(inner, (blocks - segments) * repeats)
        found += repeated(parts.state["block"], blocks)
        for name, messages, state in (
            ("embedding", parts.embedding, parts.state["embedding"]),
            ("head", parts.head, parts.state["head"]),
        ):
            if name in names:
                found += [*repeated(messages, repeats), *state]
        if number > 0 and rank_of(job, number - 1) != place.pp:
            found += repeated(map(seen_from_behind, parts.boundary), repeats)
        if number < len(cut) - 1 and rank_of(job, number + 1) != place.pp:
            found += repeated(parts.boundary, repeats)
    return found


def seen_from_behind(message: Message) -> Message:
    return replace(message, operation="recv" if message.operation == "send" else "send")


Line = tuple[Any, ...]


def counted(messages: Iterable[Message], layout: Layout) -> Counter[Line]:
    """How often each kind of message happens. Of buckets, which the program fills across parts, all bytes as
    one.
    """
    found: Counter[Line] = Counter()
    for message in spelled(joined(messages), layout):
        kind = (message.operation, message.group, message.ranks, message.phase, message.hides_behind)
        if layout.zero == 0 and is_bucket(message, layout):
            found["bytes in buckets", *kind] += int(message.payload * message.count)
        else:
            found[int(message.payload), *kind] += int(message.count)
    return +found


def is_bucket(message: Message, layout: Layout) -> bool:
    return message.hides_behind == "backward" and message.group in (
        name_in(layout, REPLICAS),
        name_in(layout, EXPERT_REPLICAS),
    )


@pytest.mark.parametrize("number", range(SMALL + LARGE))
def test_parts_add_up_to_the_account_of_a_rank(number: int) -> None:
    job = jobs()[number]
    layout = Layout.of(job)
    for position in range(job.layout.pp):
        place = Place(pp=position)
        assert counted(rank_messages(job, place), layout) == counted(account(job, place).messages, layout)


# --- what a part holds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(0, SMALL + LARGE, 4))
def test_the_sizes_of_parts_are_those_of_the_first_ranks_pieces(number: int) -> None:
    job = jobs()[number]
    expected = dict[str, Any]()
    for position in range(job.layout.pp):
        place, kinds = Place(pp=position), dict[str, list[Any]]()
        for piece in pieces(job, place):
            kinds.setdefault(piece.part, []).append(piece)
        for part, some in kinds.items():
            expected["block" if part.startswith("blocks.") else part] = size_of(some, Layout.of(job), place)
    assert part_sizes(Setup.of(job)) == {part: expected[part] for part in PARTS}


# --- many layouts at once ----------------------------------------------------------------------------------

LAYOUTS = 60
DEGREES: dict[str, tuple[int, ...]] = {
    "dp_replicate": (1, 2, 3),
    "dp_shard": (1, 4, 6),
    "cp": (1, 2, 4),
    "tp": (1, 2, 8),
    "pp": (1, 2, 3),
    "ep": (1, 2, 4),
    "micro_batch": (1, 2, 3),
    "virtual_stages": (1, 2),
}
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"zero": 0, "bucket_mb": 0.1},
    {"zero": 0, "schedule": "zbv", "recompute": "full", "cp_kind": "ulysses", "bucket_mb": 1.0},
    {"zero": 1, "schedule": "1f1b", "cp_kind": "ring"},
    {"zero": 2, "recompute": "every-2", "sequence_parallel": False},
    {"zero": 2, "reduce": "step", "cp_kind": "allgather", "tp_overlap": True},
    {"zero": 3, "schedule": "gpipe", "cp_kind": "ulysses", "recompute": "selective"},
    {"zero": 3, "schedule": "dualpipev", "recompute": "full", "cp_kind": "ring"},
    {"zero": 3, "cp_kind": "ring", "recompute": "full"},
)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("model", ["dense", "tied", "experts"])
def test_arrays_give_what_scalars_give_one_by_one(structure: dict[str, Any], model: str) -> None:
    draw = np.random.default_rng(1)
    columns: dict[str, Any] = {name: draw.choice(values, LAYOUTS) for name, values in DEGREES.items()}
    spread = (columns["dp_shard"] * columns["cp"] % columns["ep"] == 0) & (model == "experts")
    columns["ep"] = np.where(spread, columns["ep"], 1)
    settings = {"seq_len": 48, "global_batch": 432, "precision": PRECISIONS["bf16"], **structure}
    spec = ModelSpec(**SPECS[model])
    many = all_traffic(Setup(spec=spec, **settings, **columns))
    for index in range(LAYOUTS):
        numbers: dict[str, Any] = {name: int(column[index]) for name, column in columns.items()}
        one = all_traffic(Setup(spec=spec, **settings, **numbers))
        for name in one:
            assert lines(many[name], index) == lines(one[name], 0), (name, numbers)


def all_traffic(setup: Setup) -> dict[str, Iterable[Message]]:
    """The messages of every part, and of a block that is recomputed together with the next one."""
    found = Traffic(setup)
    parts = {name: getattr(found, name) for name in ("block", "embedding", "head", "boundary", "step")}
    states = {f"state of {part}": messages for part, messages in found.state.items()}
    return parts | states | {"inner block": sent(block_messages(setup, closes_segment=False))}


def lines(messages: Iterable[Message], index: int) -> Counter[Line]:
    """The messages of one of many layouts."""
    found: Counter[Line] = Counter()
    for m in messages:
        payload, ranks, count = (
            int(np.ravel(x)[index if np.ndim(x) else 0]) for x in (m.payload, m.ranks, m.count)
        )
        found[m.operation, payload, m.group, ranks, m.phase, m.hides_behind, m.joins] += count
    return +found


def test_one_layout_has_plain_numbers() -> None:
    """So that they can be printed, and written as JSON."""
    for job in jobs()[::20]:
        messages = [m for each in all_traffic(Setup.of(job)).values() for m in each]
        assert {type(x) for m in messages for x in (m.payload, m.ranks, m.count)} == {int}


# --- experts -----------------------------------------------------------------------------------------------


@given(
    cp=st.sampled_from([1, 2, 3, 4]),
    dp_shard=st.integers(1, 4),
    ulysses=st.booleans(),
    half_chunk=st.integers(1, 5),
    each=st.integers(1, 3),
    data=st.data(),
)
def test_tokens_dealt_in_turn_are_counted(
    cp: int, dp_shard: int, ulysses: bool, half_chunk: int, each: int, data: st.DataObject
) -> None:
    ep = data.draw(st.sampled_from([n for n in range(1, dp_shard * cp + 1) if dp_shard * cp % n == 0]))
    here = data.draw(st.integers(0, dp_shard * cp - 1))
    experts = max(2, each * ep) if ep > 1 else 4
    chosen = data.draw(st.integers(1, experts))
    spec = ModelSpec(**SPECS["dense"] | {"experts": experts, "experts_per_token": chosen})
    length = 2 * cp * half_chunk
    kind = "" if cp == 1 else "ulysses" if ulysses else "ring"
    setup = Setup(spec, length, 8, PRECISIONS["fp32"], 2, dp_shard=dp_shard, cp=cp, ep=ep, cp_kind=kind)
    whole = torch.arange(length)
    coming = 0
    for sender in range(here - here % ep, here - here % ep + ep):
        position = sender % cp
        mine = whole.chunk(cp)[position] if kind == "ulysses" else local_part(whole, position, cp)
        turns = (mine[:, None] * chosen + torch.arange(chosen)).flatten() % experts
        coming += int((turns // (experts // ep) == here % ep).sum())
    assert expert.dealt(setup, here) == 2 * coming


# --- what hides behind what --------------------------------------------------------------------------------


def hidden(messages: Iterable[Message]) -> dict[str, set[str | None]]:
    found: dict[str, set[str | None]] = {}
    for message in messages:
        found.setdefault(message.group, set()).add(message.hides_behind)
    return found


def setup_of(model: str = "dense", **settings: Any) -> Setup:
    spec = ModelSpec(**SPECS[model])
    return Setup(spec=spec, seq_len=16, global_batch=16, precision=PRECISIONS["bf16"], **settings)


def test_what_messages_hide_behind() -> None:
    both = {"forward", "backward"}
    ring = Traffic(setup_of(tp=2, cp=2, cp_kind="ring", dp_shard=2, zero=3, pp=2, schedule="1f1b"))
    assert hidden(ring.block) == {"tp": {None}, "cp": {"attention"}}
    assert hidden(ring.boundary) == {"pp": both}
    assert hidden(ring.state["block"]) == {"dp_shard*cp": both, "tp": {None}}
    assert hidden(ring.step) == {"pp*dp_replicate*dp_shard*cp*tp": {None}}
    for kind in ("ulysses", "allgather"):
        assert hidden(Traffic(setup_of(cp=2, cp_kind=kind)).block) == {"cp": {None}}
    assert hidden(Traffic(setup_of("experts", dp_shard=2, ep=2, zero=3)).block) == {"ep": {None}}
    assert hidden(Traffic(setup_of(dp_replicate=2)).state["block"]) == {"dp_replicate*cp": {"backward"}}


def test_overlap_hides_what_fused_operators_send() -> None:
    found = Traffic(setup_of(tp=2, tp_overlap=True))
    assert hidden(found.block) == {"tp": {"matmul"}}
    assert hidden(found.embedding) == hidden(found.head) == {"tp": {None}}
    experts = Traffic(setup_of("experts", tp=2, tp_overlap=True)).block
    assert hidden(experts) == {"tp": {"matmul", None}}
    plain = Traffic(setup_of("experts", tp=2)).block
    assert sum(m.count for m in experts) == sum(m.count for m in plain)


def test_nothing_is_sent_by_one_process() -> None:
    assert set(all_traffic(setup_of()).values()) == {()}


# --- joining -----------------------------------------------------------------------------------------------


def test_what_joins_is_one_message() -> None:
    late = Message("all_reduce", 8, "tp", 2, 3, "optimizer", joins=True)
    other = Message("all_reduce", 8, "tp", 2, 3, "forward")
    assert joined([late, other, replace(late, payload=100, count=1)]) == [
        other,
        replace(late, payload=124, count=1),
    ]
