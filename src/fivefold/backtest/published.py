"""Published training runs: rows of a CSV file, read into the same terms as our own jobs.

docs/backtest.md has the rules by which blank cells are filled; records/words.toml, what words in a cell mean.
A row that cannot be read is left out and named, with its column; the others are used.
"""

import csv
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivefold.hardware.cluster import Cluster
from fivefold.hardware.devices import find_device
from fivefold.hardware.presets import CLUSTERS
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.flops import flops_per_token
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput, Problem, did_you_mean
from fivefold.schedules import schedule_named

RECORDS = Path(__file__).parent / "records"
PUBLISHED_RUNS = RECORDS / "runs.csv"
"""Shipped with the package; each row names its source."""
with open(PUBLISHED_RUNS, newline="", encoding="utf-8") as _published:
    COLUMNS = tuple(next(csv.reader(_published)))
"""Of any file of runs: those of the published one."""

GBIT = 1e9 / 8
GPUS_A_SERVER = 8
MOST, WIDEST = 2**24, 1024
"""No count of GPUs, tokens of a sequence or rows of a matrix is larger; no head is wider."""
OPTIONAL = ("tied", "parallel_block", "experts", "experts_per_token", "shared_experts")
"""Fields of a model that only records/models.json has."""


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
            runs.append(Row(number, cells).run())
        except BadInput as error:
            problems += error.problems
    return runs, problems


@dataclass(frozen=True)
class Publication:
    """One entry of `records/publications.toml`: what it says once for all its rows."""

    pattern: str  # found in the row's `source`
    stack: str  # name of the software stack (`stacks.toml`)
    other: Mapping[str, str] | None = None  # a second stack: the column and the pattern that tell its rows
    gbits: float | None = None  # Gbit/s from a GPU to another server; None: as its usual server has it
    recompute: str = "none"  # where the row's cell is blank
    zero: int = 0  # ZeRO stage where the row's `sharding` is blank
    batch: int | None = None  # sequences of a step where the cell is blank; None: one micro-batch a rank
    vocab: int = 51_200  # where neither the row nor records/models.json has it
    # How its TFLOP/s count, for rows without step time or tokens/s: "model" (full attention), "causal", or
    # "hardware" (full attention, with what recomputation repeats).
    flops: str = "model"


@cache
def record(name: str) -> dict[str, Any]:
    """What a TOML or JSON file of `records/` holds."""
    text = (RECORDS / name).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    return found


def first_match(entries: Sequence[dict[str, Any]], text: str) -> dict[str, Any]:
    """The first entry whose `pattern` is found in a text; empty where there is none."""
    return next((entry for entry in entries if re.search(entry["pattern"], text)), {})


class Row:
    """One row of a file of runs."""

    def __init__(self, number: int, cells: Mapping[str, str | None]):
        self.number, self.cells = number, cells
        publications = record("publications.toml")["publication"]
        self.publication = Publication(**first_match(publications, self.text("source")))
        self.known = first_match(record("models.json")["models"], self.text("model").lower())

    def text(self, column: str) -> str:
        return (self.cells.get(column) or "").strip()

    def wrong(self, column: str, message: str, hint: str = "") -> BadInput:
        return BadInput([Problem(f"row {self.number}, column {column}", message, hint)])

    def number_in(self, column: str) -> float | None:
        """A positive number, or None when blank."""
        text = self.text(column)
        if not text:
            return None
        hint = "Leave it blank if unknown."
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            raise self.wrong(column, f"'{text}' is not a number", hint) from None
        if not 0 < value < math.inf:
            raise self.wrong(column, f"{text} is not above zero", hint)
        return value

    def size(self, column: str) -> int | None:
        """A whole number as the row gives it, or as the model's name says; None when neither does."""
        value, known = self.number_in(column), self.known.get(column)
        if value is not None and (value > MOST or value != round(value)):
            raise self.wrong(column, f"{self.text(column)} is not a whole number up to {MOST:,}")
        return known if value is None or column in self.known.get("always", ()) else round(value)

    def _meaning(self, column: str, text: str, hint: str = "") -> str:
        """What `records/words.toml` has for the text of a cell."""
        meanings: dict[str, str] = record("words.toml")[column]
        for pattern, meaning in meanings.items():
            if re.search(pattern, text.lower()):
                return meaning
        raise self.wrong(column, f"'{text}' is not known", hint or did_you_mean(text, set(meanings.values())))

    def _noted(self, pattern: str, column: str = "notes") -> int | None:
        """The number that a pattern finds in the text of a cell."""
        found = re.search(pattern, self.text(column))
        return int(found[1]) if found else None

    def run(self) -> PublishedRun:
        """All of the row."""
        setup, dtype = self.setup(), self.dtype()
        return PublishedRun(
            row=self.number,
            source=self.text("source"),
            model=self.text("model"),
            stack=self.stack() + {"float8": "-fp8", "float4": "-fp4"}.get(dtype, ""),
            device=self._meaning("gpu", self.text("gpu")),
            network=self.network(),
            gpus=int(setup.ranks),
            setup=setup,
            dtype=dtype,
            step_time=self.step_time(setup),
            memory_gib=self.number_in("memory_GB"),
            status=self.text("status") or "ok",
            notes=self.text("notes"),
        )

    def dtype(self) -> str:
        return self._meaning("precision", self.text("precision"), "Known: bf16, fp16, fp8, fp4 and blank.")

    def stack(self) -> str:
        """Sources that tabulate two stacks say in the row which one it is of."""
        other = self.publication.other
        if other and re.search(other["pattern"], self.text(other["column"])):
            return other["stack"]
        return self.publication.stack

    def network(self) -> float | None:
        """Bytes/s that one GPU can send to another server; None where nothing was published."""
        server = self._noted(r"(\d+) ?Gbps/node")
        gbits = self.publication.gbits if server is None else server / GPUS_A_SERVER
        return None if gbits is None else gbits * GBIT

    def spec(self) -> ModelSpec:
        """The model, its blank cells filled."""
        hidden = self.size("hidden")
        if hidden is None:
            raise self.wrong("hidden", f"is blank, and no shape is known for '{self.text('model')}'")
        gated = bool(self.known.get("gated", False))
        heads = self.size("heads") or self._likely_heads(hidden)
        vocab = self.size("vocab") or self.publication.vocab
        optional: dict[str, Any] = {name: self.known[name] for name in OPTIONAL if name in self.known}
        try:
            return ModelSpec(
                name=self.text("model") or "unnamed",
                vocab_size=vocab,
                dim=hidden,
                layers=self._layers(hidden, vocab),
                heads=heads,
                kv_heads=self.size("kv_heads") or heads,
                head_dim=self.known.get("head_dim") or max(1, hidden // heads),
                ffn=self.size("ffn") or (hidden * 8 // 3 if gated else 4 * hidden),
                activation="swiglu" if gated else "gelu",
                norm="rmsnorm" if gated else "layernorm",
                positions="rope" if gated else "learned",
                max_seq_len=self.size("seq_len") or 4096,
                **optional,
            )
        except ValidationError as error:
            told = "; ".join(str(problem["msg"]) for problem in error.errors())
            raise self.wrong("model", f"its shape is impossible: {told}") from error

    def _likely_heads(self, hidden: int) -> int:
        """As many heads as are nearest to 128 wide, divide the hidden size and split by tp."""
        tp = self.size("tp") or 1
        widths = (width for width in range(1, WIDEST + 1) if hidden % (width * tp) == 0)
        return hidden // min(widths, key=lambda width: abs(width - 128), default=hidden)

    def _layers(self, hidden: int, vocab: int) -> int:
        given = self._noted(r"(?:truncated to|proxy) (\d+) layers", "model") or self.size("layers")
        if given is not None:
            return given
        total = self.number_in("params_B")
        if total is None:
            raise self.wrong("layers", "is blank, and so is params_B, from which it could be guessed")
        pp = self.size("pp") or 1
        return pp * max(1, round((total * 1e9 - vocab * hidden) / (12.0 * hidden**2 * pp)))

    def setup(self) -> Setup:
        """Model, batch and layout, blanks filled."""
        spec = self.spec()
        tp, pp, cp, ep = (self.size(axis) or 1 for axis in ("tp", "pp", "cp", "ep"))
        model_ranks = tp * pp * cp
        dp = self.size("dp") or 1
        gpus = self.size("n_gpus") or max(GPUS_A_SERVER, model_ranks * dp)
        if gpus % model_ranks:
            raise self.wrong("n_gpus", f"{gpus} is not a multiple of tp x pp x cp = {model_ranks}")
        data = gpus // model_ranks
        zero, shard = self._sharding(data)
        recomputed = self.text("recompute") or self.publication.recompute
        recompute = self._meaning("recompute", recomputed, "Known: none, full, selective and blank.")
        schedule, virtual_stages = self._pipeline(spec.layers, pp)
        batch = self.size("global_batch")
        micro_batch = self.size("micro_batch") or self._likely_micro_batch(spec, pp, batch, data)
        if batch is None:
            batch, once = self.publication.batch, data * micro_batch
            if batch is None or batch % once:
                batch = once * (self._noted(r"(?:micro_num |mbc=)(\d+)") or 1)
        micro_batch = max(1, min(micro_batch, batch // data))
        setup = Setup(
            spec=spec,
            seq_len=spec.max_seq_len,
            global_batch=max(batch, data * micro_batch),
            precision=PRECISIONS["fp16" if self.dtype() == "float16" else "bf16"],
            micro_batch=micro_batch,
            dp_replicate=data // shard,
            dp_shard=shard,
            cp=cp,
            tp=tp,
            pp=pp,
            ep=math.gcd(ep, data * cp) if spec.experts is not None else 1,
            virtual_stages=virtual_stages,
            zero=zero,
            schedule=schedule,
            recompute=recompute,
            cp_kind="" if cp == 1 else "allgather" if "all-gather" in self.text("notes") else "ring",
            tp_overlap=bool(re.search(r"async ?tp", self.text("notes"), re.IGNORECASE)),
            sequence_parallel=not re.search(r"no sequence parallelism|TP \(all-reduce\)", self.text("notes")),
        )
        return self._with_worked_batch(setup)

    def _pipeline(self, layers: int, pp: int) -> tuple[str, int]:
        """The schedule, and how many stages a rank holds."""
        schedule = self._meaning("schedule", self.text("schedule"))
        if pp == 1:
            return "", 1
        if schedule_named(schedule).stages == 2:
            return schedule, 2
        most = max(1, -(-layers // pp))
        given = most if self.text("virtual_stages").startswith("max") else self.size("virtual_stages")
        if schedule == "1f1b" and (given or 1) > 1:
            schedule = "interleaved"
        if given is None and schedule == "interleaved":
            given = max(count for count in range(1, min(most, 8) + 1) if most % count == 0)
        return schedule, min(given or 1, most)

    def _sharding(self, data: int) -> tuple[int, int]:
        """ZeRO stage, and how many data ranks share one copy of the state."""
        text = self.text("sharding").lower() or str(self.publication.zero)
        hint = "Known: 0, 1, 2, 3, and words such as FSDP, HSDP, zero1 group N."
        zero = int(self._meaning("sharding", text, hint))
        if zero == 0:
            return 0, 1
        sized = re.search(r"(?:shard|group)\s+(\d+)", text)
        group = int(sized.group(1)) if sized else GPUS_A_SERVER if "hsdp" in text else data
        return zero, group if data % group == 0 else data

    def _likely_micro_batch(self, spec: ModelSpec, pp: int, batch: int | None, data: int) -> int:
        if noted := self._noted(r"max micro batch that fits = (\d+)"):
            return noted
        if pp > 1 or batch is None:
            return 1
        return max(1, min(16_384 // spec.max_seq_len, batch // data))

    def _with_worked_batch(self, setup: Setup) -> Setup:
        """The batch that was worked on, where the source's TFLOP/s and seconds say it was less than half.

        Tests on one server were run with a smaller batch than the one that the table's heading names.
        """
        teraflops, seconds = self.number_in("tflops_per_gpu"), self.number_in("step_time_s")
        if self.publication.flops != "hardware" or teraflops is None or seconds is None:
            return setup
        worked = teraflops * 1e12 * int(setup.ranks) * seconds
        batch = worked / (self._counted(setup) * setup.seq_len)
        if batch > setup.global_batch / 2:
            return setup
        least = int(setup.micro_batch * setup.dp_replicate * setup.dp_shard)
        return replace(setup, global_batch=max(1, round(batch / least)) * least)

    def _counted(self, setup: Setup) -> float:
        """FLOPs a token, as the source counts them."""
        if self.publication.flops == "causal":
            return flops_per_token(setup.spec, setup.seq_len).model
        full = flops_per_token(setup.spec, setup.seq_len, "full")
        return full.hardware(setup.recompute) if self.publication.flops == "hardware" else full.model

    def step_time(self, setup: Setup) -> float | None:
        """Seconds a step, from whatever was published."""
        columns = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")
        seconds, rate, teraflops = (self.number_in(column) for column in columns)
        tokens = 1.0 * setup.global_batch * setup.seq_len / int(setup.ranks)
        if seconds is None and rate is not None:
            return tokens / rate
        if seconds is None and teraflops is not None:
            return tokens * self._counted(setup) / (teraflops * 1e12)
        return seconds
