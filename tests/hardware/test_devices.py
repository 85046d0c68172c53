"""The device table, by the names that drivers give."""

from __future__ import annotations

import pytest

from fivefold.hardware.devices import DEVICES, find_device, this_cpu


@pytest.mark.parametrize(
    ("driver_name", "name", "bf16"),
    [
        ("NVIDIA H200", "H200", 989.4e12),
        ("NVIDIA H200 NVL", "H200 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", 312e12),
        ("NVIDIA B200", "B200", 2250e12),
        ("NVIDIA GB200", "GB200", 2500e12),
        ("NVIDIA B300 SXM6 AC", "B300", 2250e12),
        ("NVIDIA GB300", "GB300", 2500e12),
        ("NVIDIA A800-SXM4-80GB", "A800 SXM 80GB", 312e12),
        ("NVIDIA H800", "H800 SXM", 989.4e12),
        ("AMD Instinct MI300X", "MI300X", 1307.4e12),
        ("AMD Instinct MI355X", "MI355X", 2516.6e12),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB", None),
        ("Tesla P100-PCIE-16GB", "P100 PCIe", None),
        ("Tesla K40m", "K40m", None),
    ],
)
def test_devices_are_found_by_the_drivers_name(driver_name, name, bf16):
    device = find_device(driver_name)
    assert device is not None
    assert device.name == name
    assert device.peak_flops.get("bfloat16") == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "",
    ],
)
def test_what_is_not_in_the_table_is_unknown(name):
    assert find_device(name) is None


def test_every_device_is_found_by_its_own_name():
    assert [find_device(device.name) for device in DEVICES] == list(DEVICES)


def test_rates_do_not_fall_as_numbers_get_smaller():
    for device in DEVICES:
        peak = device.peak_flops
        kinds = ("float64", "float32", "tf32", "float16", "float8", "float4")
        rates = [peak[kind] for kind in kinds if kind in peak]
        assert rates == sorted(rates), device.name


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops", "gib"),
    [
        ("P100 SXM2", "float16", 21.2, 16),
        ("V100 SXM2 32GB", "float16", 125, 32),
        ("A100 SXM 80GB", "bfloat16", 312, 80),
        ("H100 SXM", "bfloat16", 989.4, 80),
        ("B200", "bfloat16", 2250, 180),
        ("TPU v5p", "bfloat16", 459, 95),
    ],
)
def test_dense_peaks_stand_in_the_table(name, dtype, teraflops, gib):
    device = find_device(name)
    assert device is not None
    assert device.peak_flops[dtype] == teraflops * 1e12
    assert device.memory_gib == gib


def test_the_h100_is_the_one_of_its_whitepaper():
    device = find_device("H100 SXM")
    assert device is not None
    assert (device.sms, device.l2_mib, device.memory_bandwidth) == (132, 50, 3350e9)


def test_cores_are_a_multiple_of_the_units_they_are_in():
    for device in DEVICES:
        if device.sms and device.fp32_cores:
            assert device.fp32_cores % device.sms == 0, device.name
        if device.sms and device.tensor_cores:
            assert device.tensor_cores % device.sms == 0, device.name


def test_every_figure_has_a_source():
    assert all(device.source for device in DEVICES)


def test_ranks_share_this_cpu_and_its_rates_are_unknown():
    whole, half = this_cpu(), this_cpu(2)
    assert whole.memory_gib > 0
    assert half.memory_gib == pytest.approx(whole.memory_gib / 2)
    assert whole.peak_flops == {}
    assert "2 ranks" in half.name
