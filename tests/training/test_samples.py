"""The sample log: what was trained on, whatever the layout, and whatever was killed in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.comm.world import World
from fivefold.data.corpus import open_corpus
from fivefold.problems import BadNews
from fivefold.training.lines import LineFile
from fivefold.training.ranks import run_ranks
from fivefold.training.run import TrainingRun
from fivefold.training.samples import BITS, FILE, SampleLog, digest, read_samples
from tests.cases import SPEC, Case

BATCH = 4


def log_attempt(folder: Path, attempt: int, steps: range) -> None:
    log = SampleLog(folder, attempt)
    for step in steps:
        log.write(step, (step - 1) * BATCH, BATCH, 1000 * attempt + step)
    log.file.close()


@given(ends=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=5), torn=st.integers(0, 60))
@settings(deadline=None, max_examples=60)
def test_the_history_is_what_the_last_attempts_took(
    tmp_path_factory: pytest.TempPathFactory, ends: list[tuple[int, int]], torn: int
) -> None:
    """Attempts that begin at some earlier step, take some, and are cut off in the middle of a line."""
    folder, reached = tmp_path_factory.mktemp("log"), 0
    expected: dict[int, int] = {}
    for attempt, (back, taken) in enumerate([*ends, (0, 3)], 1):
        begun = max(0, reached - back)
        expected = {step: by for step, by in expected.items() if step <= begun or not taken}
        expected |= dict.fromkeys(range(begun + 1, begun + taken + 1), attempt)
        log_attempt(folder, attempt, range(begun + 1, begun + taken + 1))
        with (folder / FILE).open("a") as file:
            file.write('{"step": 1, "attempt": 9, "first": 0, "last": 3, "digest": "0"}'[:torn])
        reached = max(expected, default=0)
    history = read_samples(folder)
    assert {entry.step: entry.attempt for entry in history} == expected
    assert [entry.first for entry in history] == [(entry.step - 1) * BATCH for entry in history]


def test_what_is_missing_skipped_or_repeated_is_found(tmp_path: Path) -> None:
    log_attempt(tmp_path, 1, range(1, 4))
    assert len(read_samples(tmp_path)) == 3
    with pytest.raises(BadNews, match="step 4 is missing"):
        read_samples(tmp_path, until=5)
    log_attempt(tmp_path, 2, range(6, 8))
    with pytest.raises(BadNews, match="step 4 is missing"):
        read_samples(tmp_path)
    for first, kind in ((13, "skipped"), (11, "repeated")):
        line = {"step": 4, "attempt": 3, "first": first, "last": first + 3, "digest": "0"}
        with (tmp_path / FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
        with pytest.raises(BadNews, match=f"samples are {kind} at step 4"):
            read_samples(tmp_path)


def test_ranks_digests_add_up_to_that_of_one_process_and_see_every_sample() -> None:
    corpus = open_corpus("random", seq_len=8, vocab_size=50, document_length=5)

    def of_step(step: int, ranks: int, micro_batch: int) -> int:
        total = 0
        for rank in range(ranks):
            with corpus.train_loader(8, micro_batch, rank, ranks, start_step=step) as loader:
                total += digest(next(iter(loader)))
        return total % (1 << BITS)

    alone = of_step(3, 1, 8)
    assert {of_step(3, 4, 1), of_step(3, 2, 2), of_step(3, 1, 4)} == {alone}
    assert of_step(4, 1, 8) != alone
    with corpus.train_loader(8, 8, start_step=3) as loader:
        (batch,) = next(iter(loader))
    batch.tokens[5, 2] += 1
    assert digest([batch]) != alone


LAYOUTS: dict[str, dict[str, int]] = {name: {name: 2} for name in ("dp_shard", "tp", "cp", "pp")}


def logged(world: World, folder: Path) -> None:
    """Two steps of each layout, as a run takes them."""
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir(exist_ok=True)
        job = Case(name, 2, layout, {"steps": 2}, spec=SPEC | {"layers": 2}).job()
        with TrainingRun(job, world, folder / name) as run:
            while not run.done:
                run.advance()


def test_a_run_logs_the_samples_of_one_process_on_any_layout(tmp_path: Path) -> None:
    run_ranks(logged, 2, tmp_path)
    with open_corpus("random", seq_len=16, vocab_size=67).train_loader(8, 8) as loader:
        expected = [f"{digest(next(loader)):010x}" for _ in (1, 2)]
    for name in LAYOUTS:
        assert [entry.digest for entry in read_samples(tmp_path / name)] == expected, name


def test_a_full_disk_does_not_end_a_run() -> None:
    full = LineFile(Path("/dev/full"))
    full.write({"step": 1})
    full.close()
