"""Writes the tables of devices, links and clusters into hardware.md, between its markers.

python docs/make_hardware.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fivefold.hardware.cluster import Cluster
from fivefold.hardware.devices import DEVICES, Device
from fivefold.hardware.links import LINKS
from fivefold.hardware.presets import CLUSTERS

PAGE = Path(__file__).with_name("hardware.md")


def in_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:,g}"


def teraflops(device: Device, *dtypes: str) -> str:
    """The peak of the first of these that the device has."""
    return next((f"{device.peak_flops[d] / 1e12:,.7g}" for d in dtypes if d in device.peak_flops), "")


def devices() -> str:
    header = (
        "device",
        "16 bit",
        "fp8",
        "tf32",
        "fp32",
        "GiB",
        "GB/s",
        "SMs",
        "FP32 cores",
        "tensor cores",
        "L2 MiB",
        "host GB/s",
        "source",
    )
    rows = [
        (
            device.name,
            teraflops(device, "bfloat16", "float16"),
            teraflops(device, "float8"),
            teraflops(device, "tf32"),
            teraflops(device, "float32"),
            figure(device.memory_gib),
            figure(device.memory_bandwidth / 1e9),
            *map(figure, (device.sms, device.fp32_cores, device.tensor_cores, device.l2_mib)),
            figure(device.host_bandwidth and device.host_bandwidth / 1e9),
            device.source,
        )
        for device in DEVICES
    ]
    return in_markdown(header, rows)


def links() -> str:
    rows = [
        (link.name, figure(link.bandwidth / 1e9), figure(link.latency * 1e6), link.source) for link in LINKS
    ]
    return in_markdown(("link", "GB/s each way", "us a hop", "source"), rows)


def levels(cluster: Cluster) -> str:
    return "; ".join(
        f"{level.name} of {level.devices:,}: {level.bandwidth / 1e9:g} GB/s"
        + (f", {level.oversubscription:g} times oversubscribed" if level.oversubscription > 1 else "")
        for level in cluster.levels
    ).replace(f"of {2**62:,}", "of any size")


def clusters() -> str:
    rows = [(f"`{name}`", cluster.device.name, levels(cluster)) for name, cluster in CLUSTERS.items()]
    return in_markdown(("name", "device", "levels, innermost first"), rows)


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in (("devices", devices()), ("links", links()), ("clusters", clusters())):
        start, end = f"<!-- {name}: made by make_hardware.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}\n\n{table}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
