"""A cluster as a TOML file, such that reading it back gives the same cluster.

    name = "two-servers"
    device = "H100 SXM"             # a name of the device table, or a [device] section
    price = 2.5                     # $ for a device and hour; may be left out

    [[levels]]                      # innermost first
    name = "server"
    devices = 8
    bandwidth = 450e9               # bytes/s each way of one device
    latency = 3.4e-6                # seconds of one hop
    oversubscription = 1.0          # may be left out
    reduces = true                  # may be left out

`devices = "unlimited"` is for an outermost level that takes as many as one has. `fivefold probe` adds a
[measured] section. Every complaint names the key and the value, and all of them are made at once.
"""

import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from fivefold.hardware.devices import DEVICES, Device, find_device
from fivefold.hardware.topology import OPERATIONS, UNLIMITED, Cluster, Level, Measured, Rates
from fivefold.problems import BadInput, Problem, did_you_mean, refuse
from fivefold.toml import toml_key, toml_value

Tree = Mapping[str, Any]
T = TypeVar("T")

CLUSTER_KEYS = ("name", "device", "price", "levels", "measured")
DEVICE_KEYS = (
    "name",
    "memory_gib",
    "memory_bandwidth",
    "peak_flops",
    "source",
    "sms",
    "fp32_cores",
    "tensor_cores",
    "l2_mib",
    "host_bandwidth",
    "is_host",
)
LEVEL_KEYS = ("name", "devices", "bandwidth", "latency", "oversubscription", "reduces")
MEASURED_KEYS = ("matmul", "tall", "attention", "memory_bandwidth", "launch", "sharded", "collectives")
OUTWARDS = "Levels go from the innermost outwards: each has as many devices or more, on links no faster."


# --- reading -----------------------------------------------------------------------------------------------


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that a file describes. Raises `BadInput` with all that is wrong."""
    try:
        tree = tomllib.loads(Path(path).read_bytes().decode())
    except FileNotFoundError:
        hint = "`fivefold probe --out FILE` writes one."
        raise BadInput([Problem(str(path), "there is no such cluster file", hint)]) from None
    except OSError as error:
        raise BadInput([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise BadInput([Problem(str(path), f"is not UTF-8 (byte {error.start})")]) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput([Problem(str(path), f"is not TOML: {error}")]) from None
    return parse_cluster(tree, str(path))


def parse_cluster(tree: Tree, where: str = "") -> Cluster:
    """The cluster of a parsed file; `where` goes in front of every key in complaints."""
    reader = _Reader(where)
    reader.known(tree, "", CLUSTER_KEYS)
    cluster = Cluster(
        name=reader.text(tree, "name"),
        device=_device(reader, tree),
        levels=_levels(reader, tree),
        price=reader.number(tree, "price", above=-math.inf, least=0.0) if "price" in tree else None,
        measured=_measured(reader, reader.table(tree, "measured")) if "measured" in tree else None,
    )
    refuse(reader.problems)
    return cluster


class _Reader:
    """Takes values out of tables, and collects what is wrong with them."""

    def __init__(self, where: str):
        self.where = where
        self.problems: list[Problem] = []

    def complain(self, key: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(f"{self.where}: {key}" if self.where else key, message, hint))

    def known(self, table: Tree, prefix: str, names: tuple[str, ...]) -> None:
        for key in table:
            if key not in names:
                self.complain(prefix + key, "there is no such key", did_you_mean(key, names))

    def text(self, table: Tree, key: str, prefix: str = "") -> str:
        value = table.get(key)
        if isinstance(value, str) and value:
            return value
        return self._wrong(table, prefix + key, key, "a text in quotes", "")

    def number(
        self, table: Tree, key: str, prefix: str = "", above: float = 0.0, least: float = -math.inf
    ) -> float:
        """A finite number, more than `above` and at least `least`."""
        value = table.get(key)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if fits and value is not None and value > above and value >= least:
            return float(value)
        allowed = "a number above 0" if above == 0 else f"a number of at least {least:g}"
        return self._wrong(table, prefix + key, key, allowed, 1.0)

    def flag(self, table: Tree, key: str, prefix: str = "") -> bool:
        """Yes or no; no where nothing is said."""
        value = table.get(key, False)
        return (
            value
            if isinstance(value, bool)
            else self._wrong(table, prefix + key, key, "true or false", False)
        )

    def table(self, tree: Tree, key: str, prefix: str = "") -> Tree:
        value = tree.get(key)
        if isinstance(value, dict):
            return value
        return self._wrong(tree, prefix + key, key, f"a section: [{prefix}{key}] and its keys below", {})

    def _wrong(self, table: Tree, path: str, key: str, allowed: str, instead: T) -> T:
        message = f"{toml_value(table[key])} is not allowed" if key in table else "is missing"
        self.complain(path, message, f"Allowed: {allowed}.")
        return instead


def _device(reader: _Reader, tree: Tree) -> Device:
    given = tree.get("device")
    if isinstance(given, dict):
        return _own_device(reader, given)
    name = reader.text(tree, "device")
    found = find_device(name)
    if found is None and name:
        known = did_you_mean(name, (device.name for device in DEVICES))
        reader.complain("device", f"there is no device '{name}'", f"{known} Or describe it under [device].")
    return found or DEVICES[0]


def _own_device(reader: _Reader, table: Tree) -> Device:
    reader.known(table, "device.", DEVICE_KEYS)
    peak = reader.table(table, "peak_flops", "device.") if "peak_flops" in table else {}
    units = ("sms", "fp32_cores", "tensor_cores", "l2_mib", "host_bandwidth")
    name = reader.text(table, "name", "device.")
    return Device(
        name=name,
        peak_flops={dtype: reader.number(peak, dtype, "device.peak_flops.") for dtype in peak},
        memory_gib=reader.number(table, "memory_gib", "device."),
        memory_bandwidth=reader.number(table, "memory_bandwidth", "device.", -math.inf, 0.0),
        words=frozenset(name.lower().split()),
        source=reader.text(table, "source", "device.") if "source" in table else "its cluster file",
        is_host=reader.flag(table, "is_host", "device."),
        **{unit: _unit(reader, table, unit) for unit in units if unit in table},
    )


def _unit(reader: _Reader, table: Tree, unit: str) -> Any:
    value = reader.number(table, unit, "device.", -math.inf, 0.0)
    return int(value) if value.is_integer() else value


def _levels(reader: _Reader, tree: Tree) -> tuple[Level, ...]:
    given = tree.get("levels")
    if not isinstance(given, list) or not given or not all(isinstance(entry, dict) for entry in given):
        reader.complain(
            "levels",
            "is missing" if given is None else f"{toml_value(given)} is not allowed",
            "Allowed: one [[levels]] section or more, innermost first.",
        )
        return ()
    levels = tuple(_level(reader, entry, f"levels[{index}].") for index, entry in enumerate(given))
    for index, (inner, outer) in enumerate(itertools.pairwise(levels), start=1):
        wrong = {
            "devices": ("fewer", outer.devices < inner.devices),
            "bandwidth": ("faster", outer.bandwidth > inner.bandwidth),
        }
        for key, (how, is_wrong) in wrong.items():
            if is_wrong:
                message = f"{getattr(outer, key):g} is {how} than the {getattr(inner, key):g}"
                message += f" of '{inner.name}' inside it"
                reader.complain(f"levels[{index}].{key}", message, OUTWARDS)
    return levels


def _level(reader: _Reader, table: Tree, prefix: str) -> Level:
    reader.known(table, prefix, LEVEL_KEYS)
    return Level(
        name=reader.text(table, "name", prefix),
        devices=_count(reader, table, prefix),
        bandwidth=reader.number(table, "bandwidth", prefix),
        latency=reader.number(table, "latency", prefix, -math.inf, 0.0),
        oversubscription=reader.number(table, "oversubscription", prefix, -math.inf, 1.0)
        if "oversubscription" in table
        else 1.0,
        reduces=reader.flag(table, "reduces", prefix),
    )


def _count(reader: _Reader, table: Tree, prefix: str) -> int:
    value = table.get("devices")
    if value == "unlimited":
        return UNLIMITED
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    message = f"{toml_value(value)} is not allowed" if "devices" in table else "is missing"
    reader.complain(f"{prefix}devices", message, 'Allowed: an integer above 0, or "unlimited".')
    return 1


def _measured(reader: _Reader, table: Tree) -> Measured:
    reader.known(table, "measured.", MEASURED_KEYS)
    attention = reader.table(table, "attention", "measured.") if "attention" in table else {}
    return Measured(
        matmul=_rates(reader, reader.table(table, "matmul", "measured."), "measured.matmul."),
        attention={dtype: reader.number(attention, dtype, "measured.attention.") for dtype in attention},
        memory_bandwidth=reader.number(table, "memory_bandwidth", "measured."),
        launch=reader.number(table, "launch", "measured.", -math.inf, 0.0),
        sharded=reader.number(table, "sharded", "measured.", -math.inf, 0.0) if "sharded" in table else 0.0,
        collectives=_collectives(reader, table),
        tall=_rates(reader, reader.table(table, "tall", "measured."), "measured.tall.")
        if "tall" in table
        else {},
    )


def _rates(reader: _Reader, table: Tree, prefix: str) -> dict[str, Rates]:
    return {dtype: _pairs(reader, table, dtype, prefix) for dtype in table}


def _pairs(reader: _Reader, table: Tree, key: str, prefix: str) -> Rates:
    """Pairs of numbers above 0, the first ones rising."""
    value = table[key]
    pairs = value if isinstance(value, list) else []
    sound = bool(pairs) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf for x in pair)
        for pair in pairs
    )
    if sound and all(one[0] < two[0] for one, two in itertools.pairwise(pairs)):
        return tuple((float(pair[0]), float(pair[1])) for pair in pairs)
    hint = "Allowed: pairs of numbers above 0, such as [[1e6, 2e9], [1e9, 5e9]], by rising first number."
    reader.complain(prefix + key, f"{toml_value(value)} is not allowed", hint)
    return ()


def _collectives(reader: _Reader, table: Tree) -> dict[str, dict[int, Rates]]:
    if "collectives" not in table:
        return {}
    found: dict[str, dict[int, Rates]] = {}
    given = reader.table(table, "collectives", "measured.")
    reader.known(given, "measured.collectives.", OPERATIONS)
    for operation in (name for name in OPERATIONS if name in given):
        prefix = f"measured.collectives.{operation}."
        sizes = reader.table(given, operation, "measured.collectives.")
        found[operation] = {}
        for ranks in sizes:
            if ranks.isdecimal() and int(ranks) > 1:
                found[operation][int(ranks)] = _pairs(reader, sizes, ranks, prefix)
            else:
                reader.complain(f"{prefix}{ranks}", "is not a number of ranks", "Allowed: 2 and above.")
    return found


# --- writing -----------------------------------------------------------------------------------------------


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster into a file that `read_cluster` reads."""
    Path(path).write_text(dump_cluster(cluster))


def dump_cluster(cluster: Cluster) -> str:
    """The text of a cluster file."""
    in_table = find_device(cluster.device.name) == cluster.device
    lines = [f"name = {toml_value(cluster.name)}"]
    if in_table:
        lines.append(f"device = {toml_value(cluster.device.name)}")
    if cluster.price is not None:
        lines.append(f"price = {toml_value(cluster.price)}")
    if not in_table:
        device = {key: value for key, value in asdict(cluster.device).items() if value is not None}
        lines += _section("[device]", {key: device[key] for key in DEVICE_KEYS if key in device})
    for level in cluster.levels:
        devices = "unlimited" if level.devices >= UNLIMITED else level.devices
        lines += _section("[[levels]]", asdict(level) | {"devices": devices})
    if cluster.measured is not None:
        lines += _measured_lines(cluster.measured)
    return "\n".join(lines) + "\n"


def _measured_lines(measured: Measured) -> list[str]:
    figures = {name: getattr(measured, name) for name in ("memory_bandwidth", "launch", "sharded")}
    lines = _section("[measured]", figures)
    for name in ("matmul", "tall", "attention"):
        if getattr(measured, name) or name == "matmul":
            lines += _section(f"[measured.{name}]", getattr(measured, name))
    for operation, sizes in measured.collectives.items():
        lines += _section(f"[measured.collectives.{operation}]", sizes)
    return lines


def _section(header: str, table: Mapping[Any, Any]) -> list[str]:
    return ["", header, *(f"{toml_key(key)} = {toml_value(value)}" for key, value in table.items())]
