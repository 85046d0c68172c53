"""How near a device came to its peak, told: shares where a peak is known, rates alone where none is."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.bench.reached import Point, Reached, Sweep
from fivefold.report.reached import header, picture, remarks, rows, title


def sweep(peaks: dict[str, float], *sizes: int, shape: dict[str, int] | None = None) -> Sweep:
    points = [Point(dtype, size, Reached(8e14, 6.5e14)) for dtype in ("bf16", "fp32") for size in sizes]
    return Sweep("mlp" if shape else "matmul", "H200", "2.11.0", 2.0, peaks, tuple(points), shape or {})


def test_shares_of_a_known_peak() -> None:
    known = sweep({"bf16": 1e15}, 8192)
    assert header(known) == ("dtype", "size", "fresh TFLOP/s", "HFU", "sustained TFLOP/s", "HFU")
    assert rows(known) == [
        ("bf16", "8,192", "800", "80.0%", "650", "65.0%"),
        ("fp32", "8,192", "800", "", "650", ""),
    ]
    assert "peaks, dense, in TFLOP/s: bf16 1,000" in remarks(known)
    assert "no peak of this device in fp32 is known, so there is no HFU to give" in remarks(known)


def test_rates_alone_where_no_peak_is_known() -> None:
    unknown = sweep({}, 512)
    assert header(unknown) == ("dtype", "size", "fresh TFLOP/s", "sustained TFLOP/s")
    assert rows(unknown)[0] == ("bf16", "512", "800", "650")
    assert remarks(unknown)[1] == "no peak of this device is known, so there is no HFU to give"


def test_a_network_is_described() -> None:
    network = sweep({"bf16": 1e15}, 4096, shape={"width": 8192, "layers": 8})
    assert title(network).startswith("training of a ReLU network, 8 layers of 8,192 x 8,192: H200")
    assert header(network)[1:4] == ("rows", "fresh TFLOP/s", "MFU")


@pytest.mark.parametrize("sizes", [(512,), (512, 1024, 8192)], ids=["bars", "lines"])
@pytest.mark.parametrize("peaks", [{}, {"bf16": 1e15}], ids=["rates", "shares"])
def test_it_is_drawn(tmp_path: Path, sizes: tuple[int, ...], peaks: dict[str, float]) -> None:
    picture(sweep(peaks, *sizes), str(tmp_path / "reached.png"))
    assert (tmp_path / "reached.png").read_bytes().startswith(b"\x89PNG")
