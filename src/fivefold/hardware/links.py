"""Links: what one device can send through each, in bytes a second and ONE direction, by their makers.

Two ways to print these figures lead to errors of 2x and 8x. Vendors of NVLink add both directions up (the
H100's 900 GB/s are 450 each way). Networks are sold in gigabits: 400 Gb/s InfiniBand is 50 GB/s, and 100
gigabit Ethernet 12.5 GB/s, where one of the texts this project follows prints 400 GB/s and 25 GB/s.
"""

from dataclasses import dataclass

GIGA = 1e9


@dataclass(frozen=True)
class Link:
    """A kind of link. `bandwidth` is bytes/s each way for one device, `latency` seconds for one hop."""

    name: str
    bandwidth: float
    latency: float
    source: str


NVLINK_HOP = 3.4e-6
"""A step of a ring between GPUs of one server: NCCL's tuning table, ring, simple protocol."""
NETWORK_HOP = 14e-6
"""A step of a ring between servers: the same table."""
HOST_HOP = 6e-6
"""A step through a host's PCIe switch or root. An estimate between the two above; NCCL's table has 5.7."""

NVLINK_2 = Link("NVLink 2", 150 * GIGA, NVLINK_HOP, "V100 datasheet: 300 GB/s both ways")
NVLINK_3 = Link("NVLink 3", 300 * GIGA, NVLINK_HOP, "A100 datasheet: 600 GB/s both ways")
NVLINK_3_A800 = Link("NVLink 3 (A800)", 200 * GIGA, NVLINK_HOP, "A800 datasheet: 400 GB/s both ways")
NVLINK_4 = Link("NVLink 4", 450 * GIGA, NVLINK_HOP, "H100 datasheet: 900 GB/s both ways")
NVLINK_4_H800 = Link("NVLink 4 (H800)", 200 * GIGA, NVLINK_HOP, "H800: 400 GB/s both ways")
NVLINK_5 = Link("NVLink 5", 900 * GIGA, NVLINK_HOP, "HGX B200 datasheet: 1.8 TB/s both ways")
XGMI_3 = Link("Infinity Fabric 3", 448 * GIGA, NVLINK_HOP, "MI300X data sheet: 7 links of 64 GB/s each way")
XGMI_4 = Link("Infinity Fabric 4", 537.6 * GIGA, NVLINK_HOP, "MI355X data sheet: 7 links of 76.8 each way")
NVLINK_C2C = Link("NVLink C2C", 450 * GIGA, NVLINK_HOP, "GB200 datasheet: 900 GB/s both ways, GPU to CPU")
PCIE_3 = Link("PCIe 3.0 x16", 16 * GIGA, HOST_HOP, "PCI-SIG: 8 GT/s x 16 lanes, before encoding")
PCIE_4 = Link("PCIe 4.0 x16", 32 * GIGA, HOST_HOP, "PCI-SIG: 16 GT/s x 16 lanes, before encoding")
PCIE_5 = Link("PCIe 5.0 x16", 64 * GIGA, HOST_HOP, "PCI-SIG: 32 GT/s x 16 lanes, before encoding")
INFINIBAND_HDR = Link("InfiniBand HDR", 25 * GIGA, NETWORK_HOP, "200 Gb/s, IBTA roadmap")
INFINIBAND_NDR = Link("InfiniBand NDR", 50 * GIGA, NETWORK_HOP, "400 Gb/s, IBTA roadmap")
INFINIBAND_XDR = Link("InfiniBand XDR", 100 * GIGA, NETWORK_HOP, "800 Gb/s, IBTA roadmap")
ROCE_400 = Link("RoCE 400", 50 * GIGA, NETWORK_HOP, "400 Gb/s a GPU, Llama 3 paper (arXiv 2407.21783) 3.3.1")
ETHERNET_100 = Link("100 gigabit Ethernet", 12.5 * GIGA, NETWORK_HOP, "100 Gb/s, IEEE 802.3")
# A ring along one axis of the torus leaves a chip by two of its six links.
ICI_V5P = Link(
    "TPU v5p ICI", 200 * GIGA, 1e-6, "Google Cloud: 1,200 GB/s both ways over 6 links, 2 of them here"
)
ICI_V4 = Link(
    "TPU v4 ICI", 100 * GIGA, 1e-6, "TPU v4 paper (arXiv 2304.01433): 6 links of 50 GB/s, 2 of them here"
)
DCN_V5P = Link("TPU v5p data center network", 6.25 * GIGA, NETWORK_HOP, "Google Cloud: 50 Gb/s a chip")
SHARED_MEMORY = Link("memory of one computer", 2 * GIGA, 50e-6, "an assumption; `fivefold probe` measures it")

LINKS: tuple[Link, ...] = (
    NVLINK_2,
    NVLINK_3,
    NVLINK_3_A800,
    NVLINK_4,
    NVLINK_4_H800,
    NVLINK_5,
    XGMI_3,
    XGMI_4,
    NVLINK_C2C,
    PCIE_3,
    PCIE_4,
    PCIE_5,
    INFINIBAND_HDR,
    INFINIBAND_NDR,
    INFINIBAND_XDR,
    ROCE_400,
    ETHERNET_100,
    ICI_V5P,
    ICI_V4,
    DCN_V5P,
    SHARED_MEMORY,
)
