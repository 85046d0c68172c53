"""`fivefold bench`: what is printed, what a file keeps, and what is refused before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.bench import reached
from tests.commands.typed import typed

QUICK = ("--device", "cpu", "--seconds", "0.001")
MATMUL = ("bench", "matmul", "--sizes", "16,32", "--dtypes", "fp32", *QUICK)
MLP = ("bench", "mlp", "--width", "16", "--layers", "2", "--rows", "8", *QUICK)


@pytest.fixture(autouse=True)
def _without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reached, "REST", {"cpu": 0.0})


@pytest.mark.parametrize(("words", "share"), [(MATMUL, "HFU"), (MLP, "MFU")], ids=["matmul", "mlp"])
def test_measured_drawn_kept_and_shown_again(words: tuple[str, ...], share: str, tmp_path: Path) -> None:
    done = typed(*words, "--json", "--png", str(tmp_path / "one.png"))
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["bench"] == words[1]
    saved = tmp_path / "saved.json"
    saved.write_text(done.stdout)
    shown = typed(*words[:2], "--from", str(saved), "--png", str(tmp_path / "two.png"))
    assert shown.exit_code == 0, shown.stderr
    assert "sustained TFLOP/s" in shown.stdout
    assert f"no peak of this device is known, so there is no {share} to give" in shown.stdout
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("matmul --sizes 512x", "--sizes: '512x' is no size"),
        ("matmul --dtypes fp8", "--dtypes: 'fp8' is unknown"),
        ("matmul --dtypes tf32", "--dtypes: tf32 is how CUDA GPUs since Ampere multiply float32"),
        ("matmul --device cuda", "--device: cuda, but torch sees no GPU here\n    Give --device cpu"),
        ("matmul --seconds 0", "--seconds: 0 is no length of time"),
        ("matmul --seconds inf", "--seconds: inf is no length of time"),
        ("matmul --png here.xyz", "Name a file that ends in .png, .svg or .pdf."),
        ("matmul --png /nowhere/here.png", "--png: '/nowhere/here.png': there is no folder"),
        ("matmul --from none.json", "--from: 'none.json' there is no such file"),
        ("matmul --from none.json --sizes 512", "--sizes: says nothing beside --from"),
        ("mlp --rows 0", "--rows: '0' is no size"),
        ("mlp --width 0", "--width: 0 is no size"),
        ("mlp --layers -1", "--layers: -1 is no size"),
        ("mlp --rows 999999999", "--rows: 999,999,999 takes"),
        ("mlp --from none.json --width 8", "--width: says nothing beside --from"),
        ("collectives --sizes 64XB", "--sizes: '64XB' is no size"),
        ("collectives --sizes 0", "--sizes: '0' is no size"),
        ("collectives --sizes 8 --ranks 4", "--sizes: 8 bytes cannot be dealt to 4 ranks\n    Give 16 bytes"),
        ("collectives --sizes 999999GiB", "ranks, 3 times, is more than is free"),
        ("collectives --seconds inf", "--seconds: inf is no length of time"),
        ("collectives --png times", "--png: 'times' has no ending"),
        ("collectives --draw ring --ranks 0", "--ranks: 0 ranks cannot be drawn"),
        ("collectives --draw ring --sizes 64MB", "--sizes: says nothing beside --draw"),
        ("collectives --worked-examples --ranks 8", "--ranks: says nothing beside --worked-examples"),
        ("collectives --worked-examples --png a.png", "--png: says nothing beside --worked-examples"),
    ],
)
def test_bad_input_exits_2_before_anything_is_measured(words: str, said: str) -> None:
    ended = typed("bench", *words.split())
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong = ("--width", "0", "--rows", "x", "--dtypes", "fp8", "--png", "/nowhere/x.png")
    told = json.loads(typed("bench", "mlp", *wrong, "--json").stdout)
    assert {problem["key"] for problem in told["problems"]} == {"--width", "--rows", "--dtypes", "--png"}


def test_worked_examples() -> None:
    done = typed("bench", "collectives", "--worked-examples")
    assert done.exit_code == 0, done.stderr
    assert "in 0.49 s" in done.stdout
    for words in ("7B on 8 A100s", "70B on 64 H100s", "1T on 4,096 H100s", "breaks down", "Assumed:"):
        assert words in done.stdout
    told = json.loads(typed("bench", "collectives", "--worked-examples", "--json").stdout)
    assert [round(one["ratio"], 5) for one in told["ratios"]] == [0.00044, 0.07657, 1.27957]


@pytest.mark.parametrize("name", ["matmul", "mlp", "collectives"])
def test_help_teaches(name: str) -> None:
    shown = typed("bench", name, "--help").stdout
    assert "Examples:" in shown
    assert f"fivefold bench {name}" in shown
