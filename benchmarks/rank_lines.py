"""What context parallelism costs a rank: `benchmarks/rank_alone.py` of one layout after the other.

    python -m benchmarks.rank_lines [--cases NAME ...] [--steps 3] [--json FILE] [--section.key=value ...]

llama3-8b, pp 2, selective recomputation, compiled, messages free: the first rank, on one device. A case's
step beside that of cp 1 with sequences of the same length, in micro-batches of 1, and as many tokens a rank;
of 131,072 tokens a sequence the bar is of MFU. Each case is a process of its own. Exit 1 where one misses its
bar. `--small`: a model that any machine computes in seconds.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trained import SMALL, output_of, words_of
from fivefold.problems import BadInput, refuse, unwritable
from fivefold.report.table import as_table

COMMON: dict[str, object] = {
    "model.preset": "llama3-8b",
    "layout.pp": 2,
    "layout.tp": 1,
    "training.recompute": "selective",
    "training.compile": "true",
}


@dataclass(frozen=True)
class Case:
    """A rank of a layout.

    tokens   a rank computes in a step
    base     the case whose step it is held against
    most     times that step: its bar
    least    MFU: its bar
    """

    name: str
    seq_len: int
    tokens: int
    cp: int = 1
    kind: str = ""
    micro_batch: int = 1
    base: str = ""
    most: float | None = None
    least: float | None = None

    @property
    def settings(self) -> dict[str, object]:
        kind = {"layout.cp_kind": self.kind} if self.kind else {}
        return {
            "layout.cp": self.cp,
            **kind,
            "training.seq_len": self.seq_len,
            "model.max_seq_len": self.seq_len,
            "training.micro_batch": self.micro_batch,
            "training.global_batch": self.tokens * self.cp // self.seq_len,
        }


K = 1024
CASES = [
    Case("8k, cp 1", 8 * K, 32 * K),
    Case("8k, cp 4 ring, micro-batch 4", 8 * K, 32 * K, 4, "ring", 4, base="8k, cp 1", most=1.12),
    Case("8k, cp 4 ring, micro-batch 1", 8 * K, 32 * K, 4, "ring", base="8k, cp 1", most=1.2),
    Case("32k, cp 1", 32 * K, 64 * K),
    Case("32k, cp 4 ring", 32 * K, 64 * K, 4, "ring", base="32k, cp 1", most=1.06),
    Case("32k, cp 4 allgather", 32 * K, 64 * K, 4, "allgather", base="32k, cp 1", most=1.06),
    Case("32k, cp 4 ulysses", 32 * K, 64 * K, 4, "ulysses", base="32k, cp 1", most=1.06),
    Case("128k, cp 8 ring", 128 * K, 32 * K, 8, "ring", least=0.48),
]
SHORTER = 256
"""Times shorter are the sequences of `--small`."""


def settings_of(case: Case, small: bool) -> dict[str, object]:
    """The keys of a case's job."""
    settings = COMMON | case.settings
    if not small:
        return settings
    length = case.seq_len // SHORTER
    longest = {"model.max_seq_len": length, "training.seq_len": length}
    return settings | SMALL | longest | {"model.kv_heads": 4}  # ulysses deals heads to 4 ranks


def judged(case: Case, figures: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], bool]:
    """A row of the table, and whether its bar is met or cannot be judged here."""
    mine, base = figures[case.name], figures.get(case.base)
    ratio = mine["step_s"] / base["step_s"] if base else None
    mfu = mine["mfu"] if isinstance(mine["mfu"], float) else None
    good = (ratio is None or case.most is None or ratio <= case.most) and (
        mfu is None or case.least is None or mfu >= case.least
    )
    memory = mine["memory_gib"]
    bar = f"<= {case.most}" if case.most else f"MFU >= {case.least:.0%}" if case.least else ""
    return [
        case.name,
        f"{mine['step_s']:.3f}",
        "" if ratio is None else f"{ratio:.3f}",
        "" if mfu is None else f"{mfu:.1%}",
        f"{memory:.1f}" if isinstance(memory, float) else "",
        bar,
        "" if good else "MISSED",
    ], good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny model, on whatever there is")
    parser.add_argument("--compiled-in", metavar="FOLDER", help="keep what is compiled there")
    parser.add_argument("--json", metavar="FILE", help="write all figures there, after each case anew")
    asked, overrides = parser.parse_known_args()
    try:
        refuse(unwritable(asked.json, "--json"))
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    figures: dict[str, Any] = {}
    cases = [case for case in CASES if case.name in asked.cases]
    for case in cases:
        words = [*words_of(settings_of(case, asked.small)), *overrides]
        command = [sys.executable, "-m", "benchmarks.rank_alone", "--steps", str(asked.steps), *words]
        figures[case.name] = json.loads(output_of(command, asked.compiled_in))
        print(f"{case.name}: {figures[case.name]['step_s']:.3f} s", file=sys.stderr, flush=True)
        if asked.json:
            Path(asked.json).write_text(json.dumps(figures, indent=1) + "\n")
    rows, good = zip(*(judged(case, figures) for case in cases), strict=True)
    print(f"{figures[cases[0].name]['device']}, torch {figures[cases[0].name]['torch']}")
    print(as_table(["", "step s", "times cp 1", "MFU", "GiB", "bar", ""], rows))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
