"""Published training runs: rows of a CSV file, read into the same terms as our own jobs.

How blank cells are filled stands in `published_row.py`. A row that cannot be read is left out and named, with
its column; the others are used.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.backtest.published_row import RECORDS, Row
from fivefold.hardware.cluster import Cluster
from fivefold.hardware.devices import find_device
from fivefold.hardware.presets import CLUSTERS
from fivefold.ledger.setup import Setup
from fivefold.problems import BadInput, Problem

PUBLISHED_RUNS = RECORDS / "runs.csv"
"""Shipped with the package; each row names its source."""

with open(PUBLISHED_RUNS, newline="", encoding="utf-8") as _published:
    COLUMNS = tuple(next(csv.reader(_published)))
"""Of any file of runs: those of the published one."""


@dataclass(frozen=True)
class PublishedRun:
    """One published measurement, blanks filled; None: not published."""

    row: int  # its number in the file, from 0
    source: str
    model: str
    stack: str  # name of the software stack, with "-fp8" or "-fp4" where matrix products are in those
    device: str  # name in our device table
    network: float | None  # bytes/s that one device can send to another server
    gpus: int
    setup: Setup
    dtype: str
    step_time: float | None  # seconds; from tokens/s or TFLOP/s where only those were published
    memory_gib: float | None  # peak of the fullest GPU as the source counts it
    status: str  # "ok", or why there is no time
    notes: str

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def moe(self) -> bool:
        return self.setup.spec.experts is not None

    @property
    def repeatable(self) -> bool:
        """Whether repeats of such runs agree in the Ultrascale playbook; others differ twofold and more."""
        return bool(self.setup.pp == 1 and self.setup.tp <= 8 and self.gpus <= 128)

    @property
    def publication(self) -> str:
        """The source without the section of it that the row is from."""
        return self.source.split(" [")[0].strip()

    @property
    def cluster(self) -> Cluster:
        """Where it ran: the device's usual server, or that of the H100, on the network of the source."""
        usual = (each for each in CLUSTERS.values() if each.device.name == self.device)
        like = next(usual, CLUSTERS["dgx-h100"])
        inner, *outer = like.levels
        if self.network is not None:
            outer = [replace(level, bandwidth=self.network) for level in outer]
        device = find_device(self.device) or like.device
        return replace(like, name=f"published {self.device}", device=device, levels=(inner, *outer))


def read_runs(path: str | Path = PUBLISHED_RUNS) -> tuple[list[PublishedRun], list[Problem]]:
    """The runs of a CSV file with the columns of the published one, and what could not be read.

    Raises `BadInput` when the file is missing, or has none of the columns that say what was run.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names, rows = reader.fieldnames or [], list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput([Problem(str(path), f"cannot be read: {error}", "Give a CSV file.")]) from error
    if not {"model", "n_gpus"} <= set(names):
        hint = "Columns of a file of runs: " + ", ".join(COLUMNS) + "."
        raise BadInput([Problem(str(path), "has no columns 'model' and 'n_gpus'", hint)])
    missing = [name for name in COLUMNS if name not in names]
    problems = [Problem(f"column {name}", "is missing; its cells are taken as blank") for name in missing]
    runs = []
    for number, cells in enumerate(rows):
        try:
            runs.append(_read(Row(number, cells)))
        except BadInput as error:
            problems += error.problems
    return runs, problems


def _read(row: Row) -> PublishedRun:
    setup, dtype = row.setup(), row.dtype()
    return PublishedRun(
        row=row.number,
        source=row.text("source"),
        model=row.text("model"),
        stack=row.stack() + {"float8": "-fp8", "float4": "-fp4"}.get(dtype, ""),
        device=row.device(),
        network=row.network(),
        gpus=int(setup.ranks),
        setup=setup,
        dtype=dtype,
        step_time=row.step_time(setup),
        memory_gib=row.number_in("memory_GB"),
        status=row.text("status") or "ok",
        notes=row.text("notes"),
    )
