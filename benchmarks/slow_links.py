"""Two hosts joined by a slow link: what compression, local steps, overlap and HSDP give there.

    python -m benchmarks.slow_links [--rate 100mbit] [--json FILE]

Every case is a real run through torchrun on hosts that are network namespaces (`benchmarks/hosts.py`), with
`tc` limiting their links. Each ratio stands beside the one that the ledger's messages predict. Needs Linux,
root, `ip`, `unshare` and `tc`. Exit 1 where a figure misses its bar.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from benchmarks.hosts import NoHostsError
from benchmarks.link_case import HOSTS, Case, Outcome, run_case
from benchmarks.link_prediction import bytes_a_step, step_seconds
from benchmarks.links import PAYLOAD, bytes_per_second
from fivefold.problems import BadInput, refuse, unwritable
from fivefold.report.table import as_table
from fivefold.threads import cores

COMMON: dict[str, Any] = {
    "model.preset": "tiny",
    "model.layers": 2,
    "model.dim": 256,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.ffn": 1024,
    "training.precision": "fp32",
    "optimizer.lr": 1e-3,
    "training.validate_batches": 64,
    "layout.zero": 0,
    "layout.bucket_mb": 1.0,
    "checkpoint.keep": 0,
    "run.tensorboard": False,
}
LEAN = {"training.global_batch": 4, "training.seq_len": 64}
"""Next to nothing to compute: a step is its messages."""
BUSY = {"training.global_batch": 24, "training.seq_len": 64}
"""The gradients, or the weights, take as long as six steps' compute."""
EVEN = {"training.global_batch": 120, "training.seq_len": 64}
"""They take about as long as one."""
FSDP = LEAN | {"layout.zero": 3, "layout.dp_shard": 4}
HSDP = FSDP | {"layout.dp_shard": 2, "layout.dp_replicate": 2}
OUTER = {"communication.outer_lr": 0.5, "communication.outer_momentum": 0.5}
"""Runs this short have too few outer steps for a momentum of 0.9."""
DELAYED = {"communication.outer_delay": 5}
SMALL = {"model.dim": 128, "model.ffn": 512, "optimizer.lr": 2e-3}
"""A quarter of the weights and of the compute: four times the steps in the same time."""
LONG = SMALL | {"training.global_batch": 20, "training.seq_len": 64}
"""The weights take as long as five steps' compute. What a delay costs is lost early: less of a long run."""
DILOCO = LONG | OUTER | {"communication.local_steps": 10}
STREAMING = BUSY | OUTER | DELAYED | {"communication.local_steps": 20}

CASES = [
    Case("alone", LEAN, 60, slow=False, apart=True),
    Case("fp32-fast", LEAN, 800, slow=False, compute="alone", validated=True),
    Case("fp32", LEAN, 24, compute="alone"),
    Case("int8", LEAN | {"communication.compress": "int8"}, 44, compute="alone"),
    Case("diloco-20", LEAN | OUTER | {"communication.local_steps": 20}, 800, compute="alone", validated=True),
    Case("alone-busy", BUSY, 30, slow=False, apart=True),
    Case("alone-long", LONG, 60, slow=False, apart=True),
    Case("diloco-10", DILOCO, 2400, compute="alone-long", validated=True),
    Case("async-10", DILOCO | DELAYED, 2400, compute="alone-long", validated=True),
    Case("fragments-1", STREAMING | {"communication.fragments": 1}, 80, slow=False, compute="alone-busy"),
    Case("fragments-4", STREAMING | {"communication.fragments": 4}, 80, slow=False, compute="alone-busy"),
    Case("alone-even", EVEN, 14, slow=False, apart=True),
    Case("overlap-off", EVEN | {"layout.bucket_mb": 1000.0}, 14, compute="alone-even"),
    Case("overlap-on", EVEN, 14, compute="alone-even"),
    Case("fsdp-fast", FSDP, 40, ranks=2, slow=False),
    Case("fsdp", FSDP, 16, ranks=2, compute="fsdp-fast"),
    Case("hsdp-fast", HSDP, 40, ranks=2, slow=False),
    Case("hsdp", HSDP, 16, ranks=2, compute="hsdp-fast"),
]


@dataclass(frozen=True)
class Ratio:
    """A case's rate of steps over another's, or its peak of bytes a second.

    least, most  its bar, where it has one
    same_loss    the case whose held-out loss this one's must be near
    """

    what: str
    case: str
    over: str
    of: Literal["rate", "peak"] = "rate"
    least: float | None = None
    most: float | None = None
    same_loss: str = ""


RATIOS = [
    Ratio("INT8 over fp32", "int8", "fp32", least=2.5),
    Ratio("DiLoCo H=20 over fp32", "diloco-20", "fp32", least=8.0, same_loss="fp32-fast"),
    Ratio("asynchronous over plain, H=10", "async-10", "diloco-10", least=1.2, same_loss="diloco-10"),
    Ratio("peak of 4 fragments over 1", "fragments-4", "fragments-1", of="peak", most=0.3),
    Ratio("overlap over none", "overlap-on", "overlap-off"),
    Ratio("HSDP over FSDP across hosts", "hsdp", "fsdp"),
]
SHARE_LEAST, LOSS_WITHIN, PREDICTED_WITHIN = 0.95, 0.02, 0.2


class Lab:
    """The cases that have been run, and what can be said of them."""

    def __init__(self, rate: str):
        self.rate = rate
        self.bytes_a_second = bytes_per_second(rate) * PAYLOAD
        self.cases: dict[str, Case] = {}
        self.outcomes: dict[str, Outcome] = {}

    def run(self, case: Case, folder: Path) -> list[str]:
        """Run a case: its row of the table."""
        self.cases[case.name] = case
        outcome = self.outcomes[case.name] = run_case(case, COMMON, self.rate, folder)
        expected, by_ledger = self.expected_s(case), self.expected_bytes(case)
        return [
            case.name,
            f"{case.hosts} x {case.ranks}",
            self.rate if case.slow else "no limit",
            f"{1e3 * outcome.step_s:.1f}",
            "" if expected is None else f"{1e3 * expected:.1f}",
            "" if expected is None else f"{self.outcomes[case.compute].step_s / outcome.step_s:.0%}",
            f"{outcome.sent / 1e6:.3f}",
            f"{outcome.sent / by_ledger:.3f}" if by_ledger else "",
            "" if outcome.held_out is None else f"{outcome.held_out:.4f}",
        ]

    def expected_bytes(self, case: Case) -> float:
        """Bytes a step on the busiest link, by the ledger."""
        return 0.0 if case.apart else bytes_a_step(case.job(COMMON), case.ranks)

    def expected_s(self, case: Case) -> float | None:
        """Seconds of a step on the slow link, by the ledger."""
        if not case.compute or not case.slow:
            return None
        compute = self.outcomes[case.compute].step_s
        return step_seconds(case.job(COMMON), case.ranks, compute, self.bytes_a_second)

    def judged(self, ratio: Ratio) -> dict[str, Any]:
        """A ratio as measured and as the ledger has it, and whether both are as they should be."""
        mine, other = self.outcomes[ratio.case], self.outcomes[ratio.over]
        if ratio.of == "peak":
            measured = mine.peak / other.peak
            predicted = self.cases[ratio.over].fragments / self.cases[ratio.case].fragments
        else:
            measured = other.step_s / mine.step_s
            expected = [self.expected_s(self.cases[name]) for name in (ratio.over, ratio.case)]
            predicted = (expected[0] or 0.0) / (expected[1] or 1.0)
        near = self.outcomes[ratio.same_loss].held_out if ratio.same_loss else None
        loss = mine.held_out / near - 1 if mine.held_out and near else 0.0
        off = measured / predicted - 1
        met = (ratio.least or 0.0) <= measured <= (ratio.most or measured)
        good = met and loss <= LOSS_WITHIN and abs(off) <= PREDICTED_WITHIN
        return {**asdict(ratio), "measured": measured, "predicted": predicted, "loss": loss, "good": good}


HEADER = ["case", "ranks", "link", "step ms", "ledger", "compute", "sent MB", "/ledger", "held-out"]
ABOUT = """\
step: median, a round's average with local steps. ledger: compute + the ledger's bytes at the link's rate.
compute: the part of the step that it takes without messages between hosts. sent: by a host in a step, as the
link counted; /ledger: over the ledger's bytes."""


def tabulate(rate: str, folder: Path) -> tuple[bool, dict[str, Any]]:
    """Run everything, and print it: whether every bar was met, and all figures."""
    lab = Lab(rate)
    print(f"{HOSTS} hosts on {cores()} cores, torch {version('torch')}, links of {rate}\n{ABOUT}\n")
    rows = []
    for case in CASES:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        rows.append(lab.run(case, folder))
    print(as_table(HEADER, rows))
    share = 1 - lab.outcomes["alone"].step_s / lab.outcomes["fp32"].step_s
    print(f"\nfp32: {share:.1%} of a step is communication: 1 - alone / fp32 (at least {SHARE_LEAST:.0%})\n")
    judged = [lab.judged(ratio) for ratio in RATIOS]
    print(
        as_table(["ratio", "measured", "ledger", "off", "bar", "loss", ""], [_row(each) for each in judged])
    )
    figures = {
        "rate": rate,
        "cases": {name: asdict(outcome) for name, outcome in lab.outcomes.items()},
        "communication": share,
        "ratios": judged,
    }
    return share >= SHARE_LEAST and all(each["good"] for each in judged), figures


def _row(judged: Mapping[str, Any]) -> list[str]:
    least, most = judged["least"], judged["most"]
    bar = f">= {least:g}" if least else f"<= {most:g}" if most else ""
    return [
        judged["what"],
        f"{judged['measured']:.2f}",
        f"{judged['predicted']:.2f}",
        f"{judged['measured'] / judged['predicted'] - 1:+.0%}",
        bar,
        f"{judged['loss']:+.1%}" if judged["same_loss"] else "",
        "" if judged["good"] else "MISSED",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate", default="100mbit", help="of each link in each direction; default: %(default)s"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    try:
        bytes_per_second(given.rate)
        refuse(unwritable(given.json, "--json"))
        with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
            good, figures = tabulate(given.rate, Path(folder))
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except NoHostsError as error:
        print(f"no hosts can be made here: {error}", file=sys.stderr)
        return 1
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
