"""Rates of products and of a network: what is computed, what it is divided by, what a file keeps of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from fivefold.bench import products, wide_network
from fivefold.bench import reached as measured
from fivefold.bench.asked import Asked, asked
from fivefold.bench.reached import DTYPES, Dtype, Point, Reached, Sweep, multiplying, name_and_peaks, reached
from fivefold.bench.saved import as_json, read
from fivefold.bench.wide_network import Shape, shape_of
from fivefold.hardware.devices import DEVICES, find_device
from fivefold.problems import BadInput
from tests.traced import Watch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "REST", {"cpu": 0.0})


def test_a_rate_is_operations_over_seconds() -> None:
    """A call that sleeps takes that long at the least, so that its rate has a bound."""
    found = reached(lambda: time.sleep(0.01), 1e3, CPU, 0.02)
    assert 0 < found.fresh <= 1e5
    assert 0 < found.sustained <= 1e5


def test_what_is_sustained_lasts_and_comes_after_as_long_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a call takes 10 ms after a rest, and 20 ms in a long row."""
    rows: list[int] = []

    def clock(call: object, device: torch.device, calls: int) -> float:
        rows.append(calls)
        return 0.02 if calls > 10 else 0.01

    monkeypatch.setattr(measured, "seconds_of", clock)
    assert reached(lambda: None, 1.0, CPU, 0.2) == Reached(100.0, 50.0)
    assert rows == [1, 1, *[3] * measured.ROUNDS, 20, 20]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_products_of_every_dtype_are_measured(dtype: str) -> None:
    sweep = products.measure(Asked("cpu", (dtype,), (16, 32), 0.001))
    assert [(point.dtype, point.size) for point in sweep.points] == [(dtype, 16), (dtype, 32)]
    assert all(0 < rate < 1e15 for point in sweep.points for rate in point.reached)
    assert (sweep.bench, sweep.torch, sweep.seconds) == ("matmul", torch.__version__, 0.001)


def flops_seen(monkeypatch: pytest.MonkeyPatch, module: object, measure: object) -> tuple[float, float]:
    """Operations of one call by torch's counter, and those that its rate is made of."""
    seen = []

    def watched(call, flops, device, seconds):
        call()
        with Watch() as watch:
            call()
        seen.append((watch.flops, flops))
        return Reached(1.0, 1.0)

    monkeypatch.setattr(module, "reached", watched)
    measure()  # type: ignore[operator]
    return seen[0]


def test_a_product_has_the_operations_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Asked("cpu", ("fp32",), (24,), 1.0)
    counted, told = flops_seen(monkeypatch, products, lambda: products.measure(one))
    assert counted == told == 2 * 24**3


def test_a_network_has_the_operations_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products for each layer, the first one's too."""
    one, shape = Asked("cpu", ("fp32",), (12,), 1.0), Shape(width=16, layers=3)
    counted, told = flops_seen(monkeypatch, wide_network, lambda: wide_network.measure(one, shape))
    assert counted == told == shape.flops(12) == 6 * 3 * 16**2 * 12


def test_a_network_is_measured() -> None:
    sweep = wide_network.measure(Asked("cpu", ("bf16",), (8, 16), 0.001), Shape(32, 2))
    assert [point.size for point in sweep.points] == [8, 16]
    assert sweep.shape == {"width": 32, "layers": 2}


def test_float32_is_rounded_to_tf32_where_that_is_asked_for_and_nowhere_else() -> None:
    before = torch.get_float32_matmul_precision()
    with multiplying(DTYPES["tf32"]):
        assert torch.get_float32_matmul_precision() == "high"
        with multiplying(DTYPES["fp32"]):
            assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == before


def test_peaks_are_those_of_the_device_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    name, peaks = name_and_peaks("cuda", DTYPES)
    assert name == "H200"
    assert peaks == pytest.approx({"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    assert name_and_peaks("cuda", DTYPES) == ("NVIDIA GeForce RTX 4090", {})
    assert name_and_peaks("cpu", DTYPES)[1] == {}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100-SXM2-32GB")
    assert name_and_peaks("cuda", ["bf16"])[1] == {}
    assert set(name_and_peaks("cuda", ["bf16", "fp16"])[1]) == {"fp16"}


def test_every_dtype_has_its_name_in_the_table() -> None:
    names = {name for device in DEVICES for name in device.peak_flops}
    assert {dtype.peak for dtype in DTYPES.values()} <= names
    assert all(isinstance(dtype, Dtype) for dtype in DTYPES.values())


def test_tf32_is_half_of_16_bits_wherever_it_is() -> None:
    """By every vendor's data so far; a device with another would be worth a look."""
    having = [device for device in DEVICES if "tf32" in device.peak_flops]
    assert find_device("A100 SXM 80GB") in having
    assert find_device("V100 SXM2 32GB") not in having
    for device in having:
        assert device.peak_flops["tf32"] == pytest.approx(device.peak_flops["bfloat16"] / 2), device.name


# --- what is asked ----------------------------------------------------------------------------------------


def test_usual_dtypes_and_sizes() -> None:
    found = asked(None, None, ("--sizes", None), None, products.USUAL, products.needs)
    assert found == Asked("cpu", ("fp32", "bf16"), (512, 1024, 2048), 0.5)
    assert products.USUAL["cuda"][1] == (512, 1024, 2048, 4096, 8192, 16384, 32768)


def test_usual_sizes_that_do_not_fit_are_left_out() -> None:
    def needs(dtype: str, size: int) -> float:
        return 0.0 if size < 2048 else 1e18

    found = asked("cpu", "fp32", ("--sizes", None), 1, products.USUAL, needs)
    assert found.sizes == (512, 1024)


def said(*words: object, **others: object) -> str:
    with pytest.raises(BadInput) as refused:
        asked(*words, **others)  # type: ignore[arg-type]
    return str(refused.value)


def test_what_cannot_be_measured_is_refused_all_at_once() -> None:
    sizes = ("--sizes", "512,zero")
    text = said("cuda", "bf16,fp23,tf32", sizes, float("nan"), products.USUAL, products.needs)
    assert "--device: cuda, but torch sees no GPU here" in text
    assert "--dtypes: 'fp23' is unknown\n    Did you mean 'fp32'?" in text
    assert "--dtypes: tf32 is how CUDA GPUs since Ampere multiply float32" in text
    assert "--sizes: 'zero' is no size" in text
    assert "--seconds: nan is no length of time" in text


@pytest.mark.parametrize("words", ["0", "-512", "512,,1024", "1e3", "", "9" * 5000])
def test_what_is_no_size(words: str) -> None:
    text = said(None, None, ("--rows", words), 1.0, products.USUAL, products.needs)
    assert "is no size\n    Give whole numbers above 0, with commas between them" in text


def test_a_size_that_does_not_fit_is_refused_where_it_was_asked_for() -> None:
    text = said("cpu", "fp32", ("--sizes", "512,900000"), 1.0, products.USUAL, products.needs)
    assert "--sizes: 900,000 takes 9,052.5 GiB, and" in text
    assert "Give 512 or less." in text


def test_a_shape_is_usual_or_asked_for() -> None:
    assert shape_of("cuda", None, None) == (Shape(8192, 8), [])
    assert shape_of("cpu", 64, None) == (Shape(64, 4), [])
    _, wrong = shape_of("cpu", 0, -1)
    assert [problem.key for problem in wrong] == ["--width", "--layers"]


# --- what a file keeps ------------------------------------------------------------------------------------


def example() -> Sweep:
    points = (Point("bf16", 512, Reached(2e13, 1e13)), Point("fp16", 512, Reached(4e13, 3e13)))
    return Sweep("matmul", "H200", "2.11.0", 2.0, {"bf16": 1e14}, points)


def written(folder: Path, told: object) -> str:
    file = folder / "saved.json"
    file.write_text(told if isinstance(told, str) else json.dumps(told))
    return str(file)


def test_what_is_told_is_read_again(tmp_path: Path) -> None:
    told = as_json(example()) | {"png": None}
    assert told["points"][0]["hfu_sustained"] == pytest.approx(0.1)
    assert told["points"][1]["hfu_fresh"] is None  # no peak is known
    assert read(written(tmp_path, told), "matmul") == example()
    network = Sweep("mlp", "cpu", "2.13.0", 0.5, {}, example().points, {"width": 64, "layers": 2})
    told = as_json(network)
    assert "mfu_fresh" in told["points"][0]
    assert read(written(tmp_path, told), "mlp") == network


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("{", "is no JSON"),
        ("[1]", "is not what `fivefold bench` prints"),
        ({"bench": "mlp"}, "is of `fivefold bench mlp`"),
        ({"bench": "matmul", "device": "H200"}, "has no 'torch'"),
        (as_json(example()) | {"points": [{"dtype": "bf16", "size": 5}]}, "has no 'fresh'"),
        (as_json(example()) | {"peak_flops": 3}, "is damaged"),
        (as_json(example()) | {"seconds": "long"}, "is damaged"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, told: object, why: str) -> None:
    with pytest.raises(BadInput) as refused:
        read(written(tmp_path, told), "matmul")
    assert why in str(refused.value)
    assert "`fivefold bench matmul --json > FILE`" in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.json", "there is no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(BadInput, match=why):
            read(str(path), "matmul")
