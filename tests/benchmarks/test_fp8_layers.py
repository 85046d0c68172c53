"""The benchmark of layers in 8 bits, with tiny shapes: that it runs, and that nothing is left out."""

import sys

import pytest

from benchmarks import fp8_layers


def test_it_runs_anywhere_and_times_every_piece(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fp8_layers", "--small", "--rowwise"])
    fp8_layers.main()
    told = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in told.splitlines() if line.startswith("| ")]
    assert len(rows) == 4 + 1 + 3 * 6 + 3 * 3 + 3 + 3
    assert "cast both ways, rowwise: hidden" in rows
    assert "gate and up, weight" in rows
    assert rows[-3:] == ["bf16", "fp8 tensorwise", "fp8 rowwise"]
