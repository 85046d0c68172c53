"""The layouts held against one process: every axis alone, in pairs, in threes, and all pairs of settings.

A case is a line: a model, then settings of `layout` and `training`. `make test` runs those of FAST, and
`make test-all` the others. `make_covering.py` writes covering.txt, `docs/make_coverage.py` the table of
docs/coverage.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.cases import GEMMA, SPEC, TIED, Case

COVERING = Path(__file__).with_name("covering.txt")

MOE = SPEC | {"experts": 4, "experts_per_token": 2, "shared_experts": 1}
SPECS = {
    "dense": SPEC,
    "tied": TIED,
    "experts": MOE,
    "gemma": GEMMA,
    "one key": SPEC | {"kv_heads": 1, "qkv_bias": True, "qk_norm": True},
    "parallel": SPEC | {"parallel_block": True, "mlp_bias": True, "attention_out_bias": True},
}

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")
ONE_STAGE = ("naive", "gpipe", "1f1b")
KINDS = ("ring", "ulysses", "allgather")
OF_TRAINING = (
    "micro_batch",
    "global_batch",
    "recompute",
    "loss_chunk",
    "precision",
    "routing",
    "balance",
)
ROWS, BATCH, LENGTH = 2, 8, 16
"""Rows of a micro-batch, sequences of a step where they are enough for the layout, and their length."""

FAST = {
    "data": """
        dense: dp_replicate=2 zero=0
        tied: dp_replicate=2 zero=0 micro_batch=4
        dense: dp_shard=2 zero=1
        tied: dp_shard=2 zero=1 recompute=every-2
        dense: dp_shard=2 zero=2
        tied: dp_shard=2 zero=2 reduce=step
        dense: dp_shard=2 zero=3 micro_batch=4
        tied: dp_shard=2 zero=3
        dense: dp_shard=2 zero=3 reduce=step
        dense: dp_replicate=2 dp_shard=2 zero=1
        tied: dp_replicate=2 dp_shard=2 zero=2
        tied: dp_replicate=2 dp_shard=2 zero=3 recompute=full
        gemma: dp_shard=2 zero=3 recompute=selective""",
    "recomputation": """
        dense: recompute=full
        tied: recompute=every-2
        dense: recompute=every-3
        tied: recompute=sqrt
        experts: recompute=selective
        tied: dp_replicate=2 zero=0 recompute=sqrt
        dense: dp_shard=2 zero=3 recompute=every-3
        tied: dp_shard=2 zero=3 recompute=selective""",
    "tensor": """
        dense: tp=2
        tied: tp=2
        dense: tp=2 sequence_parallel=False
        tied: tp=2 sequence_parallel=False recompute=full
        one key: tp=2 sequence_parallel=False
        one key: tp=4
        parallel: tp=2 recompute=sqrt
        experts: tp=2 sequence_parallel=False
        gemma: tp=2 recompute=every-2
        dense: tp=2 recompute=selective""",
    "pipeline": """
        dense: pp=2
        tied: pp=2 schedule=naive
        tied: pp=2 schedule=gpipe
        dense: pp=2 schedule=interleaved
        tied: pp=2 schedule=looped-bfs recompute=full
        tied: pp=2 schedule=zero-bubble
        tied: pp=2 schedule=zbv
        dense: pp=2 schedule=dualpipev recompute=selective
        dense: pp=2 schedule=interleaved virtual_stages=3
        experts: pp=2
        gemma: pp=2 schedule=interleaved""",
    "context": """
        dense: cp=2 cp_kind=ring
        tied: cp=2 cp_kind=ring zero=3
        dense: cp=2 cp_kind=ring recompute=selective
        tied: cp=2 cp_kind=ulysses
        one key: cp=2 cp_kind=allgather
        dense: cp=2 cp_kind=allgather recompute=every-2 zero=1
        gemma: cp=2 cp_kind=ulysses""",
    "loss in chunks": """
        dense: loss_chunk=12
        tied: dp_replicate=2 zero=0 loss_chunk=100
        dense: dp_shard=2 zero=3 loss_chunk=12 recompute=full
        tied: tp=2 loss_chunk=12
        gemma: tp=2 sequence_parallel=False loss_chunk=12
        tied: pp=2 loss_chunk=12
        dense: pp=2 schedule=zero-bubble loss_chunk=12
        dense: cp=2 loss_chunk=7
        tied: tp=2 loss_chunk=12 precision=bf16
        dense: dp_shard=2 zero=2 loss_chunk=12 precision=fp16""",
    "experts": """
        experts: dp_shard=4 ep=2 zero=3
        experts: dp_shard=2 ep=2 zero=2 micro_batch=4
        experts: dp_shard=2 ep=2 zero=3 routing=balanced
        experts: cp=2 ep=2 zero=0
        experts: cp=2 ep=2 zero=0 recompute=selective balance=bias""",
    "two axes": """
        tied: dp_replicate=2 cp=2 zero=0
        dense: dp_replicate=2 tp=2 zero=0
        tied: dp_replicate=2 pp=2 zero=0
        dense: dp_shard=2 cp=2 zero=3
        tied: dp_shard=2 tp=2 zero=3
        tied: dp_shard=2 pp=2 zero=3
        tied: cp=2 tp=2
        tied: cp=2 pp=2
        tied: tp=2 pp=2
        dense: dp_shard=2 pp=2 zero=2 schedule=zero-bubble""",
    "precision": "\n".join(
        f"{layout} precision={precision}"
        for precision in ("fp32", "bf16", "fp16")
        for layout in (
            "dense: dp_replicate=2 zero=0",
            "tied: dp_shard=2 zero=3",
            "tied: tp=2",
            "tied: pp=2 schedule=zero-bubble",
            "dense: cp=2 cp_kind=ring",
            "dense: cp=2 cp_kind=ulysses zero=2",
            "experts: dp_shard=2 ep=2 zero=3 routing=balanced",
            "experts: tp=2 routing=balanced",
        )
    ),
}


@dataclass(frozen=True)
class Split:
    """One case: a name, what kind of model, and a layout."""

    group: str
    name: str
    model: str
    layout: tuple[tuple[str, Any], ...]
    training: tuple[tuple[str, Any], ...] = ()
    slow: bool = True

    @property
    def degrees(self) -> dict[str, Any]:
        return dict(self.layout)

    @property
    def ranks(self) -> int:
        return math.prod(v for k, v in self.layout if k in AXES)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        schedule = self.degrees.get("schedule", "1f1b")
        each = self.degrees.get("virtual_stages", 1 if schedule in ONE_STAGE else 2)
        return int(self.degrees.get("pp", 1) * each)

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The model, with a layer for each stage at least."""
        return SPECS[self.model] | {"layers": max(SPEC["layers"], self.stages)}

    @property
    def batch(self) -> int:
        """Sequences of a step: twice as many micro-batches as pipeline ranks, or what the case says."""
        settings = dict(self.training)
        data_ranks = self.degrees.get("dp_replicate", 1) * self.degrees.get("dp_shard", 1)
        pipelined = 2 * self.degrees.get("pp", 1) if "pp" in self.degrees else 1
        fewest = data_ranks * settings.get("micro_batch", ROWS) * pipelined
        return int(settings.get("global_batch", max(BATCH, fewest)))

    def case(self) -> Case:
        training = {"seq_len": LENGTH, "micro_batch": ROWS} | dict(self.training)
        layout = {"dp_replicate": 1, "dp_shard": 1} | self.degrees
        return Case(
            self.name, self.ranks, layout, training | {"global_batch": self.batch}, spec=dict(self.spec)
        )

    def one_process(self, **training: Any) -> Case:
        """The same batches of the same model without a layout."""
        kept = {k: v for k, v in self.training if k in ("routing", "balance")}
        size = {"seq_len": LENGTH, "global_batch": self.batch}
        return Case("one process", training=kept | size | training, spec=dict(self.spec))


def split(
    group: str,
    model: str,
    layout: dict[str, Any],
    training: dict[str, Any] | None = None,
    slow: bool = True,
) -> Split:
    words = [f"{k}={v}" for k, v in layout.items()] + [f"{k}={v}" for k, v in (training or {}).items()]
    name = f"{model}: " + " ".join(words)
    return Split(group, name, model, tuple(layout.items()), tuple((training or {}).items()), slow)


def read(group: str, lines: str, slow: bool) -> Iterator[Split]:
    """The cases of some lines, each `MODEL: KEY=VALUE ...`."""
    for line in filter(None, map(str.strip, lines.splitlines())):
        model, _, words = line.partition(": ")
        settings = {key: _value(word) for key, _, word in (pair.partition("=") for pair in words.split())}
        training = {key: value for key, value in settings.items() if key in OF_TRAINING}
        layout = {key: value for key, value in settings.items() if key not in OF_TRAINING}
        yield split(group, model, layout, training, slow)


def _value(word: str) -> int | bool | str:
    return int(word) if word.isdigit() else word == "True" if word in ("True", "False") else word


def with_zero(degrees: dict[str, int]) -> dict[str, Any]:
    """Degrees with the ZeRO stage that they need: 3 where dp_shard is above 1, else 0."""
    return {**degrees, "zero": 3 if degrees.get("dp_shard", 1) > 1 else 0}


def fours() -> Iterator[Split]:
    """Every axis on four ranks, and every schedule and kind of context."""
    for number, axis in enumerate(AXES):
        yield split("four along one axis", ("dense", "tied")[number % 2], with_zero({axis: 4}))
    for number, schedule in enumerate(SCHEDULES):
        layout = {"pp": 4, "schedule": schedule}
        yield split("four along one axis", ("tied", "dense")[number % 2], layout)
    for kind in KINDS:
        yield split("four along one axis", "tied", {"cp": 4, "cp_kind": kind})
    for zero in (1, 2, 3):
        yield split("four along one axis", "experts", {"dp_shard": 4, "ep": 4, "zero": zero})


def triples() -> Iterator[Split]:
    for number, three in enumerate(combinations(AXES, 3)):
        yield split("three axes", ("dense", "tied")[number % 2], with_zero(dict.fromkeys(three, 2)))


def covering() -> Iterator[Split]:
    """All pairs of settings, and some layouts drawn at random, as `make_covering.py` has written them."""
    for part in COVERING.read_text().split("# ")[1:]:
        title, _, lines = part.partition("\n")
        yield from read(title, lines, slow=True)


def all_splits() -> dict[str, Split]:
    """Every case by name."""
    fast = (one for group, lines in FAST.items() for one in read(group, lines, slow=False))
    found: dict[str, Split] = {}
    for one in (*fast, *fours(), *triples(), *covering()):
        found.setdefault(one.name, one)
    return found


SPLITS = all_splits()
