"""What is told before the first step: parameters, tokens, and how often each source is gone through."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import job_with, resolve
from fivefold.training.facts import short, sizes, times
from fivefold.training.run import corpus_of

TEXT = "Some words that are counted as bytes. "


def told(folder: Path, source: Any) -> tuple[dict[str, str], Counter[int], list[int]]:
    """The facts; how many samples the run takes of each source, counted one by one; and how many it has."""
    (folder / "a.txt").write_text(TEXT * 100)
    (folder / "b.txt").write_text(TEXT * 30)
    settings = {"model.preset": "tiny", "data.source": source, "data.cache": str(folder / "cache")}
    training = {"training.seq_len": 16, "training.steps": 25, "training.global_batch": 12}
    job = resolve(job_with(settings | training), 1)
    corpus = corpus_of(job)
    seen = Counter(corpus.order.locate(number)[0] for number in range(25 * 12))
    return sizes(job, corpus), seen, [len(part.train) for part in corpus.parts]


def test_one_source(tmp_path: Path) -> None:
    facts, seen, windows = told(tmp_path, str(tmp_path / "a.txt"))
    assert facts == {
        "parameters": "1.26M",
        "data": f"{short(windows[0] * 16)} tokens",
        "epochs": f"{seen[0] / windows[0]:.3g}",
    }


def test_a_mix_has_epochs_of_each_source_and_random_tokens_have_none(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    facts, seen, windows = told(tmp_path, [a, {"path": b, "weight": 0.5}, "random"])
    assert facts["data"] == f"{short(16 * sum(windows[:2]))} tokens"
    epochs = [float(part.split(" of ")[0]) for part in facts["epochs"].split(", ")]
    assert epochs == pytest.approx([seen[0] / windows[0], seen[1] / windows[1]], rel=5e-3)
    assert facts["epochs"].endswith(f"of {b}")
    assert told(tmp_path, "random")[0] == {"parameters": "1.26M", "data": "random tokens"}


def test_numbers_are_short() -> None:
    assert [short(n) for n in (0, 512, 999, 1000, 1_259_008, 405_853_388_800, 15.6e12)] == [
        *("0", "512", "999", "1K", "1.26M", "405.9B", "15.6T")
    ]
    assert [times(n) for n in (1e-5, 0.0337, 1.25, 99.94, 1234.5)] == [
        "under 0.001",
        "0.0337",
        "1.25",
        "99.9",
        "1,234",
    ]
