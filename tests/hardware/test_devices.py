"""The device table, by the names that drivers give."""

from __future__ import annotations

import pytest

from fivefold.hardware.devices import DEVICES, find_device


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
        ("AMD Instinct MI300X", "MI300X", 1307.4e12),
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
        "NVIDIA A800-SXM4-80GB",
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
        rates = [peak[kind] for kind in ("float64", "float32", "float16") if kind in peak]
        assert rates == sorted(rates), device.name
