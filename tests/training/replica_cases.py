"""Jobs whose replicas train alone between outer steps: what tests of them share."""

from __future__ import annotations

from typing import Any

from tests.cases import SPEC, TIED, Case
from tests.training.replicas import Mine

STEPS = 8
MOE = SPEC | {"layers": 2, "experts": 4, "experts_per_token": 2}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.0}


def case(name: str, ranks: int, layout: dict[str, Any], outer: dict[str, Any], **more: Any) -> Case:
    training = {"steps": STEPS, **more.pop("training", {})}
    return Case(name, ranks, {"dp_replicate": 2, **layout}, training, communication=outer, **more)


PLAIN = {"local_steps": 4}
LATE = {"local_steps": 4, "outer_delay": 3}
TURNS = {"local_steps": 4, "fragments": 2, "outer_delay": 3}
CASES = {
    one.name: one
    for one in (
        case("plain", 2, {"zero": 0}, PLAIN),
        case("plain sgd tied", 2, {"zero": 0}, {**PLAIN, "outer_momentum": 0.0}, optimizer=SGD, spec=TIED),
        case("bf16", 2, {"zero": 0}, PLAIN, training={"precision": "bf16"}, optimizer={"ema": 0.9}),
        case("late", 2, {"zero": 0}, LATE),
        case("late by a round", 2, {"zero": 0}, {"local_steps": 2, "outer_delay": 2}),
        case("turns", 2, {"zero": 0}, TURNS),
        case("mixed turns", 2, {"zero": 0}, {**TURNS, "outer_mix": 0.5}),
        case("every step late", 2, {"zero": 0}, {"outer_delay": 3, "outer_lr": 1.0, "outer_momentum": 0.0}),
        case("zero 3", 4, {"dp_shard": 2, "zero": 3}, TURNS),
        case("muon", 2, {"zero": 0}, PLAIN, optimizer={"name": "muon"}),
        case("muon zero 3", 4, {"dp_shard": 2, "zero": 3}, PLAIN, optimizer={"name": "muon"}),
        case("tp", 4, {"tp": 2, "zero": 0}, LATE),
        case("zero 1 cp", 4, {"cp": 2, "zero": 1}, PLAIN),
        case("cp", 4, {"cp": 2, "zero": 0}, TURNS),
        case("pp tied", 4, {"pp": 2, "zero": 0}, TURNS, spec=TIED, training={"micro_batch": 2}),
        case(
            "zbv tied",
            4,
            {"pp": 2, "zero": 0, "schedule": "zbv"},
            LATE,
            spec=TIED,
            training={"micro_batch": 1},
        ),
        case("ep", 4, {"dp_shard": 2, "ep": 2}, PLAIN, spec=MOE, training={"balance": "bias"}),
        case(
            "three replicas pp tied",
            6,
            {"dp_replicate": 3, "pp": 2, "zero": 0},
            LATE,
            spec=TIED,
            training={"micro_batch": 2, "global_batch": 12},
        ),
    )
}


def of(ranks: list[dict[str, Mine]], name: str) -> list[Mine]:
    return [rank[name] for rank in ranks]
