"""A rank under context parallelism: cases of as many tokens, jobs that there are, bars."""

import json
from typing import Any

import pytest

from benchmarks.rank_lines import CASES, Case, judged, settings_of
from benchmarks.rank_lines import main as command
from fivefold.axes.checks import check
from fivefold.axes.layout import Layout
from fivefold.config import load, resolve
from fivefold.ledger.setup import Setup


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_job_of_its_tokens(case: Case, small: bool):
    from benchmarks.rank_alone import DEFAULTS

    words = [*DEFAULTS, *(f"--{key}={value}" for key, value in settings_of(case, small).items())]
    job = load(overrides=words)
    job = resolve(job, job.layout.pp * job.layout.cp, "cpu" if small else "cuda")
    assert check(job) == []
    setup = Setup.of(job)
    assert Layout.of(job).cp == case.cp
    tokens = int(setup.tokens) * int(setup.micro_batches)
    assert tokens == case.tokens // (256 if small else 1)
    assert job.training.micro_batch == case.micro_batch


def test_each_is_held_against_one_of_the_same_length_and_tokens():
    named = {case.name: case for case in CASES}
    assert len(named) == len(CASES)
    for case in CASES:
        if case.base:
            base = named[case.base]
            assert (base.seq_len, base.tokens, base.cp, base.micro_batch) == (
                case.seq_len,
                case.tokens,
                1,
                1,
            )
            assert CASES.index(base) < CASES.index(case)


def test_a_bar_is_met_or_missed():
    base, ring, long = CASES[0], CASES[1], CASES[-1]
    figures: dict[str, dict[str, Any]] = {
        base.name: {"step_s": 1.0, "mfu": 0.5, "memory_gib": 1.0},
        ring.name: {"step_s": 1.1, "mfu": 0.5, "memory_gib": 1.0},
        long.name: {"step_s": 9.0, "mfu": 0.4, "memory_gib": "unknown"},
    }
    assert judged(ring, figures)[0][2:] == ["1.100", "50.0%", "1.0", "<= 1.12", ""]
    assert [judged(case, figures)[1] for case in (base, ring, long)] == [True, True, False]
    figures[ring.name]["step_s"] = 1.13
    assert not judged(ring, figures)[1]
    del figures[base.name]  # alone nothing can be said
    assert judged(ring, figures)[1]


@pytest.mark.slow
def test_it_runs_on_any_machine(tmp_path, capsys, monkeypatch):
    file = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["", "--small", "--steps", "1", "--json", str(file)])
    command()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(CASES)
    assert all(figures["gradients_finite"] for figures in json.loads(file.read_text()).values())
