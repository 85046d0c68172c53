"""What `fivefold doctor` says of a machine: outliers and errors are named."""

from __future__ import annotations

from fivefold.bench.machine import FIELDS, device_problems, look, parsed
from fivefold.bench.pairs import Compared

GOOD = "NVIDIA H200, 570.86, 1980, 1980, 41, 120.5, 0, 0x0000000000000000"
BAD = "NVIDIA H200, 570.86, 600, 1980, 88, 690.1, 3, 0x0000000000000048"


def test_what_nvidia_smi_says_is_read_and_judged():
    devices = parsed(f"{GOOD}\n{BAD}\n\nsomething else\n")
    assert [list(device) for device in devices] == [list(FIELDS)] * 2
    assert device_problems(devices) == [
        "GPU 1: 3 memory errors that were not corrected; have it replaced",
        "GPU 1: slowed down by hardware slowdown, heat",
    ]
    silent = parsed("NVIDIA X, 1, 2, 3, 4, 5, [N/A], [Not Supported]")
    assert device_problems(silent) == []


def test_outliers_are_named():
    products = {0: 1.0, 1: 1.01, 2: 1.3, 3: 1.0}
    messages = {(0, 1): 1.0, (0, 2): 1.1, (0, 3): 4.0, (1, 2): 1.0}
    assert Compared("cuda", products, messages).outliers() == [
        "GPU 2: a matrix product takes 1.3 times the median's time",
        "GPUs 0 and 3: a message takes 4.0 times the median's time",
    ]
    assert Compared("cuda", {0: 1.0}, {}).outliers() == []
    (said,) = Compared("cuda", {0: 1.0, 1: 1.2}, {}).outliers()  # of two, the faster one is the measure
    assert said.startswith("GPU 1: a matrix product takes 1.2 times")


def test_rates_are_flops_and_bytes_a_second():
    compared = Compared("cuda", {0: 0.5}, {(0, 1): 0.25})
    assert compared.flops == {0: 2 * 2.0 * 8192**3}
    assert compared.bandwidths == {(0, 1): 4 * 2.0**26}


def test_this_machine(tmp_path):
    machine = look(tmp_path)
    assert machine.compared is not None
    assert len(machine.compared.flops) >= 2
    assert all(rate > 0 for rate in machine.compared.bandwidths.values())
    assert {"python", "torch", "fivefold"} <= machine.versions.keys()
    assert "GiB: a checkpoint of" in machine.limits["space here"]
    assert {"ok", "problems", "flops", "bandwidths"} <= machine.told().keys()
