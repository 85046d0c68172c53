"""Which rank of a pipeline holds what: one answer for time and memory, as each program cuts."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.axes.pieces import part_sizes
from fivefold.backtest.stacks import by_cost, evenly, later_longer, stack_named, stacks
from fivefold.hardware.cluster import find_cluster
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.planner.placement import Cut, most_layers, on_ranks, ours
from fivefold.schedules import SCHEDULES
from tests.planner.stack_memory import memory_under

H100 = find_cluster("dgx-h100")


def setup_of(layers: int, **numbers: Any) -> Setup:
    spec = PRESETS["llama3-8b"].model_copy(update={"layers": layers})
    given: dict[str, Any] = {"seq_len": 4096, "global_batch": 256, "precision": PRECISIONS["bf16"]}
    return Setup(**{"spec": spec} | given | numbers)


def layers_of(cut: Cut, setup: Setup, stages: int) -> list[int]:
    return [load.layers for load in cut(setup, stages)]


# --- time and memory -------------------------------------------------------------------------------------

PIPELINES = [(29, 4, 1, "1f1b"), (32, 4, 1, "1f1b"), (61, 4, 4, "interleaved"), (30, 4, 2, "zbv")]


@pytest.mark.parametrize(("layers", "pp", "virtual", "schedule"), PIPELINES)
def test_time_and_memory_are_of_the_same_stages(layers: int, pp: int, virtual: int, schedule: str) -> None:
    setup = setup_of(layers, pp=pp, virtual_stages=virtual, schedule=schedule)
    for stack in stacks().values():
        layers_on = [load.layers for load in on_ranks(setup, stack.cut, pp, virtual)]
        needed = memory_under(setup, H100, stack)
        head_first = int(SCHEDULES[schedule].shape == "v")
        assert needed.ranks[0].weights == weights(setup, layers_on[0], 1, head_first), stack.name
        if needed.ranks[-2].number == pp - 1:  # where the head is
            assert needed.ranks[-1].weights == weights(setup, layers_on[-1], 0, 1 - head_first), stack.name


def weights(setup: Setup, layers: int, embedding: int, head: int) -> float:
    """Bytes of 16-bit weights of a rank with so many layers."""
    parts = part_sizes(setup)
    ends = parts["embedding"].times(embedding) + parts["head"].times(head)
    return 2.0 * float((parts["block"].times(layers) + ends).whole)


@pytest.mark.parametrize(("layers", "pp", "virtual", "schedule"), PIPELINES)
def test_every_layer_is_on_one_rank(layers: int, pp: int, virtual: int, schedule: str) -> None:
    setup = setup_of(layers, pp=pp, virtual_stages=virtual, schedule=schedule)
    for stack in stacks().values():
        assert sum(layers_of(stack.cut, setup, pp * virtual)) == layers, stack.name
        loads = on_ranks(setup, stack.cut, pp, virtual)
        assert [sum(column) for column in zip(*loads, strict=True)][:3] == [layers, 1, 1], stack.name


# --- the ways of cutting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [ours, evenly, later_longer, by_cost])
def test_one_stage_has_everything(cut: Cut) -> None:
    assert cut(setup_of(29), 1) == [(29, 1, 1, 1)]


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (72, 12, [6] * 12),
        (70, 12, [5, *[6] * 10, 5]),  # BLOOM: embedding and head count as a layer each
        (61, 4, [16, 16, 16, 13]),  # NVIDIA's recipes for DeepSeek-V3
        (61, 16, [*[4] * 15, 1]),
        (17, 8, [3, 3, 3, 3, 2, 1, 1, 1]),
        (2, 3, [0, 1, 1]),
    ],
)
def test_evenly(layers: int, stages: int, counts: list[int]) -> None:
    assert layers_of(evenly, setup_of(layers), stages) == counts


def test_later_stages_of_internevo_are_longer() -> None:
    assert layers_of(stack_named("internevo").cut, setup_of(32), 3) == [10, 11, 11]


def test_nanotron_places_parts_by_their_cost() -> None:
    spec = ModelSpec(vocab_size=131_072, dim=2048, layers=16, heads=32, ffn=8192, max_seq_len=4096, tied=True)
    loads = stack_named("nanotron").cut(setup_of(16, spec=spec), 8)
    assert [load.layers for load in loads] == [3, 3, 2, 3, 2, 3, 0, 0]
    assert [load.head for load in loads] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert [load.loss for load in loads] == [0, 0, 0, 0, 0, 0, 0, 1]


def test_nanotron_may_leave_the_loss_alone_to_a_rank_behind_the_head() -> None:
    spec = ModelSpec(vocab_size=131_072, dim=1024, layers=16, heads=16, ffn=4096, max_seq_len=4096, tied=True)
    setup = setup_of(16, spec=spec, pp=4, schedule="1f1b")
    loads = by_cost(setup, 4)
    head = next(load for load in loads if load.head)
    assert loads[-1].layers == 0 < head.layers
    assert most_layers(setup, by_cost) == max(load.layers for load in loads)
