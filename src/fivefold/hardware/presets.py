"""Clusters by name. Prices are not among them: they change by the week."""

from fivefold.hardware import links
from fivefold.hardware.devices import DEVICES
from fivefold.hardware.links import Link
from fivefold.hardware.topology import UNLIMITED, Cluster, Level

_BY_NAME = {device.name: device for device in DEVICES}


def _level(
    name: str, devices: int, link: Link, oversubscription: float = 1.0, reduces: bool = False
) -> Level:
    return Level(name, devices, link.bandwidth, link.latency, oversubscription, reduces)


def _servers(
    name: str, device: str, inside: Link, outside: Link, size: int = 8, reduces: bool = False
) -> Cluster:
    """Any number of servers on a network in which all can send at once, with one adapter to a device."""
    levels = (_level("server", size, inside, reduces=reduces), _level("cluster", UNLIMITED, outside))
    return Cluster(name, _BY_NAME[device], levels)


def _llama3() -> Cluster:
    """Llama 3's training cluster, by its paper (arXiv 2407.21783, section 3.3.1).

    24,576 GPUs in servers of 8, racks of 2 servers, pods of 192 racks with full bandwidth between any two,
    and 8 pods, above which the network carries a seventh of what the pods could send.
    """
    levels = (
        _level("server", 8, links.NVLINK_4, reduces=True),
        _level("rack", 16, links.ROCE_400),
        _level("pod", 3072, links.ROCE_400),
        _level("cluster", 24576, links.ROCE_400, oversubscription=7),
    )
    return Cluster("llama3", _BY_NAME["H100 SXM"], levels)


def _tpu(name: str, device: str, pod: int, inside: Link) -> Cluster:
    """Pods whose chips form a torus, joined by the data center's network."""
    levels = (_level("pod", pod, inside), _level("cluster", UNLIMITED, links.DCN_V5P))
    return Cluster(name, _BY_NAME[device], levels)


def _laptop() -> Cluster:
    """A computer that was not measured, one rank to each of 8 cores. `fivefold probe` measures one."""
    return Cluster("laptop", _BY_NAME["laptop core"], (_level("laptop", 8, links.SHARED_MEMORY),))


CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        _servers("dgx-a100", "A100 SXM 80GB", links.NVLINK_3, links.INFINIBAND_HDR),
        _servers("dgx-a100-40gb", "A100 SXM 40GB", links.NVLINK_3, links.INFINIBAND_HDR),
        _servers("dgx-a800", "A800 SXM 80GB", links.NVLINK_3_A800, links.INFINIBAND_HDR),
        _servers("dgx-h100", "H100 SXM", links.NVLINK_4, links.INFINIBAND_NDR, reduces=True),
        _servers("dgx-h800", "H800 SXM", links.NVLINK_4_H800, links.INFINIBAND_NDR, reduces=True),
        _servers("dgx-h200", "H200", links.NVLINK_4, links.INFINIBAND_NDR, reduces=True),
        _servers("dgx-b200", "B200", links.NVLINK_5, links.INFINIBAND_NDR, reduces=True),
        _servers("dgx-b300", "B300", links.NVLINK_5, links.INFINIBAND_XDR, reduces=True),
        _servers("gb200-nvl72", "GB200", links.NVLINK_5, links.INFINIBAND_NDR, size=72, reduces=True),
        _servers("gb300-nvl72", "GB300", links.NVLINK_5, links.INFINIBAND_XDR, size=72, reduces=True),
        _servers("mi300x", "MI300X", links.XGMI_3, links.INFINIBAND_NDR),
        _servers("mi325x", "MI325X", links.XGMI_3, links.INFINIBAND_NDR),
        _servers("mi355x", "MI355X", links.XGMI_4, links.INFINIBAND_NDR),
        _llama3(),
        _tpu("tpu-v4", "TPU v4", 4096, links.ICI_V4),
        _tpu("tpu-v5p", "TPU v5p", 8960, links.ICI_V5P),
        _laptop(),
    )
}
