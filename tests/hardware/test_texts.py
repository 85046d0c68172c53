"""The texts about devices, links and clusters, by the tables that are planned with: docs/mission.md."""

from __future__ import annotations

import pytest

from fivefold.hardware import links
from fivefold.hardware.cluster import find_cluster
from fivefold.hardware.devices import DEVICES

DEVICE = {device.name: device for device in DEVICES}
GIGA = 1e9


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops", "memory"),
    [
        ("P100 SXM2", "float16", 21.2, 16),  # the texts round to 22
        ("V100 SXM2 32GB", "float16", 125, 32),
        ("A100 SXM 80GB", "bfloat16", 312, 80),
        ("H100 SXM", "bfloat16", 989.4, 80),  # 1,979 is with sparsity
        ("H200", "bfloat16", 989.4, 141),
        ("B200", "bfloat16", 2250, 180),  # the lecture's 5,000 is with sparsity
        ("TPU v5p", "bfloat16", 459, 95),
    ],
)
def test_devices(name, dtype, teraflops, memory):
    assert DEVICE[name].peak_flops[dtype] == teraflops * 1e12
    assert DEVICE[name].memory_gib == memory


def test_other_devices_that_are_named_are_known():
    assert {"K40", "MI325X", "Trainium2"} <= DEVICE.keys()


def test_the_h100():
    device = DEVICE["H100 SXM"]
    assert device.memory_bandwidth == 3350 * GIGA
    assert (device.sms, device.l2_mib) == (132, 50)


def test_links_each_way():
    """One text prints 400 GB/s for InfiniBand and 25 for Ethernet: gigabits, and both directions."""
    found = {link.name: link.bandwidth / GIGA for link in links.LINKS}
    assert (found["NVLink 4"], found["NVLink 3"]) == (900 / 2, 600 / 2)
    assert (found["PCIe 5.0 x16"], found["InfiniBand NDR"], found["100 gigabit Ethernet"]) == (64, 50, 12.5)


def test_the_cluster_of_24_576():
    cluster = find_cluster("llama3")
    levels = {level.name: level.devices for level in cluster.levels}
    assert levels == {"server": 8, "rack": 16, "pod": 3072, "cluster": 24_576}
    assert (levels["rack"] // 8, levels["pod"] // 16, levels["cluster"] // 3072) == (2, 192, 8)
    pod, top = cluster.levels[2:]
    assert pod.bandwidth / pod.oversubscription == 50 * GIGA > top.bandwidth / top.oversubscription
    device, count = cluster.device, levels["cluster"]
    assert device.fp32_cores is not None
    assert device.tensor_cores is not None
    assert count * device.memory_gib * 1e9 == pytest.approx(1.97e15, rel=0.005)  # the lecture says 1.8 PB
    assert count * device.peak_flops["bfloat16"] == pytest.approx(24e18, rel=0.02)
    assert count * device.fp32_cores == pytest.approx(415e6, rel=0.001)
    assert count * device.tensor_cores == pytest.approx(13e6, rel=0.002)


def test_tpu_pods():
    assert find_cluster("tpu-v5p").server == 8960
