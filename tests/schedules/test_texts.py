"""What the texts say of pipelines' bubbles, from the orders that ranks run: docs/mission.md."""

from __future__ import annotations

import pytest

from fivefold.planner.play.timeline import play
from fivefold.schedules import schedule_named
from tests.planner.durations import equal


def useful(schedule: str, stages: int, micro_batches: int) -> float:
    """The part of the time that ranks compute in, from the first start to the last end."""
    rows = schedule_named(schedule).actions(stages, micro_batches)
    timeline = play(rows, equal(stages, 1, 1.0, 1.0, 1.0))
    return sum(timeline.busy) / stages / timeline.makespan


def test_pipeline_bubbles():
    assert useful("gpipe", 4, 4) == pytest.approx(4 / 7)  # 57%
    assert useful("1f1b", 4, 4) == pytest.approx(4 / 7)
    assert 1 - useful("gpipe", 3, 1) == pytest.approx(2 / 3)
    for stages, micro_batches in ((2, 8), (8, 8), (8, 64)):
        bubble = (stages - 1) / (micro_batches + stages - 1)
        assert 1 - useful("gpipe", stages, micro_batches) == pytest.approx(bubble)


def test_naive_model_parallelism_is_of_use_one_nth_of_the_time():
    for stages in (2, 3, 8):
        assert useful("naive", stages, 4) == pytest.approx(1 / stages)
