"""Where a cluster comes from: a name of the table, or a file that `fivefold probe` or a person wrote."""

from pathlib import Path

from fivefold.hardware.cluster_file import read_cluster, write_cluster
from fivefold.hardware.presets import CLUSTERS
from fivefold.hardware.topology import OPERATIONS, TALL, UNLIMITED, Cluster, Level, Measured, Rates, Times
from fivefold.problems import BadInput, Problem, did_you_mean

__all__ = [
    "OPERATIONS",
    "TALL",
    "UNLIMITED",
    "Cluster",
    "Level",
    "Measured",
    "Rates",
    "Times",
    "find_cluster",
    "read_cluster",
    "write_cluster",
]


def find_cluster(name: str) -> Cluster:
    """The cluster of that name, or of the file at that path. Raises `BadInput`.

    A name of the table goes first; what ends in `.toml` or has a `/` in it is a path.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if name.endswith(".toml") or "/" in name or Path(name).is_file():
        return read_cluster(name)
    hint = f"{did_you_mean(name, CLUSTERS)} Or give a cluster file (.toml); `fivefold probe` writes one."
    raise BadInput([Problem("cluster", f"there is no cluster '{name}'", hint)])
