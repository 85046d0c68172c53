"""Published runs: every shipped row is read, blanks are filled by rule, and what is nonsense is named."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.backtest.published import COLUMNS, PUBLISHED_RUNS, PublishedRun, read_runs
from fivefold.problems import BadInput

PLAIN = {
    "source": "a blog",
    "model": "Llama 3 8B",
    "gpu": "H100",
    "n_gpus": "16",
    "tp": "2",
    "seq_len": "8192",
    "global_batch": "64",
    "micro_batch": "2",
    "step_time_s": "3.5",
}


def written(tmp_path: Path, *rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    path = tmp_path / "runs.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_one(tmp_path: Path, **cells: str) -> PublishedRun:
    runs, problems = read_runs(written(tmp_path, PLAIN | cells))
    assert not problems
    return runs[0]


@pytest.fixture(scope="module")
def shipped() -> list[PublishedRun]:
    runs, problems = read_runs()
    assert problems == []
    return runs


def test_every_shipped_row_is_read(shipped: list[PublishedRun]) -> None:
    with open(PUBLISHED_RUNS, newline="", encoding="utf-8") as file:
        assert len(shipped) == sum(1 for _ in csv.DictReader(file)) == 3360
    assert [run.row for run in shipped] == list(range(3360))
    assert all(run.gpus == run.setup.ranks for run in shipped)
    assert all(run.setup.micro_batches >= 1 for run in shipped)


def test_step_time_is_what_tokens_and_flops_say(shipped: list[PublishedRun]) -> None:
    by_row = {run.row: run for run in shipped}
    # Korthikanti et al. print seconds; torchtitan prints 6,667 tokens/s/GPU for 2 x 8192 tokens a GPU.
    assert by_row[21].step_time == 1.42
    assert by_row[51].step_time == pytest.approx(16_384 / 6667, rel=1e-3)
    # Narayanan et al. print 137 TFLOP/s for 1.7B on 32 GPUs, by 96Bslh^2(1 + s/6h + V/16lh).
    h, layers, s, batch, vocab = 2304, 24, 2048, 512, 51_200
    flops = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert by_row[6].step_time == pytest.approx(flops / (137e12 * 32), rel=0.01)


def test_blank_cells_are_filled_by_the_stated_rules(tmp_path: Path) -> None:
    run = read_one(tmp_path)
    assert run.setup.spec.layers == 32
    guessed = read_one(tmp_path, model="some", params_B="7", hidden="4096", layers="", pp="8", n_gpus="64")
    assert guessed.setup.spec.layers == 32  # 33.7 by the parameter count, but equally many on 8 ranks
    assert run.setup.spec.kv_heads == 8
    assert run.setup.dp_shard == 8
    assert (run.setup.pp, run.setup.cp, run.setup.virtual_stages) == (1, 1, 1)
    assert run.dtype == "bfloat16"
    assert read_one(tmp_path, micro_batch="").setup.micro_batch == 2  # 16,384 tokens
    assert read_one(tmp_path, global_batch="", notes="micro_num 4").setup.micro_batches == 4
    assert read_one(tmp_path, dp="3").setup.dp_shard == 8  # the column is not believed
    piped = read_one(tmp_path, pp="4", schedule="interleaved 1F1B", micro_batch="")
    assert (piped.setup.virtual_stages, piped.setup.micro_batch) == (8, 1)
    assert read_one(tmp_path, pp="8", virtual_stages="max (1 layer per chunk)").setup.virtual_stages == 4
    assert read_one(tmp_path, model="Nemotron-4 340B", pp="8", n_gpus="16").setup.virtual_stages == 12


@pytest.mark.parametrize(
    ("text", "zero", "shard"),
    [
        ("", 1, 8),
        ("0", 0, 1),
        ("3", 3, 8),
        ("zero1 group 4", 1, 4),
        ("zero1 over all DP", 1, 8),
        ("DDP+distributed optimizer (FSDP=0)", 1, 8),
        ("FSDP shard 2 x DP replicate 4 (HSDP)", 3, 2),
        ("FSDP SHARD_GRAD_OP", 2, 8),
        ("FSDP no reshard after forward", 2, 8),
        ("FSDP no reshard after fwd (~zero2)", 2, 8),
    ],
)
def test_sharding_words(tmp_path: Path, text: str, zero: int, shard: int) -> None:
    setup = read_one(tmp_path, sharding=text).setup
    assert (setup.zero, setup.dp_shard) == (zero, shard)
    assert setup.dp_replicate * setup.dp_shard == 8


@pytest.mark.parametrize(
    ("text", "dtype", "stack"),
    [("amp_bf16", "bfloat16", "megatron-core"), ("fp16", "float16", "megatron-core")]
    + [(text, "float8", "megatron-core-fp8") for text in ("FP8-MX", "MXFP8", "float8 rowwise", "amp_fp8")]
    + [("NVFP4", "float4", "megatron-core-fp4")],
)
def test_precision_words(tmp_path: Path, text: str, dtype: str, stack: str) -> None:
    run = read_one(tmp_path, precision=text)
    assert (run.dtype, run.stack) == (dtype, stack)


def test_a_batch_that_was_not_worked_on_is_corrected(shipped: list[PublishedRun]) -> None:
    # One server of BLOOM's: 143.48 TFLOP/s for 130.43 s are 512 sequences, not the heading's 2048.
    assert shipped[663].setup.global_batch == 512
    assert shipped[651].setup.global_batch == 2048


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tp", "two"),
        ("n_gpus", "-8"),
        ("n_gpus", "15"),
        ("tp", "1.5"),
        ("layers", "nan"),
        ("gpu", "abacus"),
        ("precision", "int4"),
        ("recompute", "sometimes"),
        ("sharding", "a bit"),
        ("schedule", "whenever"),
        ("step_time_s", "0"),
        ("heads", "7"),
        ("memory_GB", "lots"),
    ],
)
def test_nonsense_is_named_and_the_other_rows_are_used(tmp_path: Path, column: str, value: str) -> None:
    path = written(tmp_path, PLAIN, PLAIN | {column: value}, PLAIN)
    runs, problems = read_runs(path)
    assert [run.row for run in runs] == [0, 2]
    assert len(problems) == 1
    assert "row 1, column " in problems[0].key
    assert column in problems[0].key or column == "heads"
    assert value in str(problems[0]) or column == "heads"


def test_an_unknown_model_without_a_shape_is_named(tmp_path: Path) -> None:
    runs, problems = read_runs(written(tmp_path, PLAIN | {"model": "Mystery"}))
    assert not runs
    assert "Mystery" in str(problems[0])


def test_missing_columns_are_blank_and_named(tmp_path: Path) -> None:
    columns = tuple(name for name in COLUMNS if name not in ("notes", "cp"))
    runs, problems = read_runs(written(tmp_path, PLAIN, columns=columns))
    assert len(runs) == 1
    assert {problem.key for problem in problems} == {"column notes", "column cp"}


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00\x01"])
def test_what_is_no_file_of_runs_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match="columns"):
        read_runs(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_runs(tmp_path / "none.csv")


@settings(max_examples=150, deadline=None)
@given(
    cells=st.dictionaries(
        st.sampled_from(COLUMNS),
        st.one_of(st.text(max_size=12), st.integers(-4, 5000).map(str), st.floats().map(str)),
        max_size=6,
    )
)
def test_any_row_is_read_or_named(cells: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is in a cell: the row is a run, or a problem names it, and the next row is not touched."""
    path = written(tmp_path_factory.mktemp("any"), PLAIN | cells, PLAIN)
    runs, problems = read_runs(path)
    named = {problem.key.split(",")[0] for problem in problems}
    assert [run.row for run in runs] == ([1] if "row 0" in named else [0, 1])
    assert named <= {"row 0"}
    for run in runs:
        assert run.setup.micro_batches >= 1
        assert run.gpus == run.setup.ranks
