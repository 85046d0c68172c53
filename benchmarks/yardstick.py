"""`fivefold train` beside a plain PyTorch loop of the same shapes, in turns.

    python -m benchmarks.yardstick [JOB ...] [--rounds 2] [--steps 16] [--json FILE] [--section.key=value ...]
    python -m benchmarks.yardstick --cases bf16 muon --training.global_batch=8 --training.micro_batch=2
    python -m benchmarks.yardstick --whole-8b

Cards of one kind differ by some percent. So speed is told as a ratio to a plain loop on the same card
(`benchmarks/plain_loop.py`): the sum of its steps' seconds over those of a case. Without jobs: 1b and 8b-l8,
the shapes whose figures stand in issues and docs. Each case of each round runs in a process of its own, and
counts by the median of the second half of its steps.

cases        plain, separate (the plain loop without fused projections), bf16, fp8, fp8-head, rowwise, muon;
             ratios are to the first. Four of them by default
--whole-8b   instead: all of llama3-8b on this card, fp8 tensorwise, moments in bf16, for some ways to
             recompute and batches; what does not fit says so
--small      with a model that any machine trains in seconds, to see that it runs
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.trained import DoesNotFitError, Steady, machine, output_of, shrunk, timed, words_of
from fivefold.problems import BadInput, refuse, unwritable
from fivefold.report.table import as_table

Run = Callable[[str], Steady]
"""A case by its name."""

HERE = Path(__file__).parent
JOBS = [str(HERE / "h200_1b.toml"), str(HERE / "h200_8b_l8.toml")]
FP8 = {"training.fp8": "tensorwise"}
PLAIN: dict[str, list[str]] = {"plain": [], "separate": ["--separate"]}
OURS: dict[str, Mapping[str, object]] = {
    "bf16": {},
    "fp8": FP8,
    "fp8-head": FP8 | {"training.fp8_head": "true"},
    "rowwise": {"training.fp8": "rowwise"},
    "muon": {"optimizer.name": "muon"},
}
USUAL = ["plain", "bf16", "fp8", "fp8-head"]
EIGHT_B = {
    "model.preset": "llama3-8b",
    "data.source": "random",
    "training.seq_len": 8192,
    "training.compile": "true",
    "training.precision": "bf16",
    "optimizer.states": "bf16",
    **FP8,
}
WHOLE: dict[str, Mapping[str, object]] = {
    f"{recompute}, batch {batch}": {"training.recompute": recompute, "training.global_batch": batch}
    for recompute, batch in (("full", 2), ("full", 1), ("every-2", 1), ("selective", 1))
}


def in_turns(cases: list[str], rounds: int, run: Run) -> Iterator[tuple[str, Steady | None]]:
    """Each case once a round, with its figures; None of one that does not fit, which is not tried again."""
    without: set[str] = set()
    for _ in range(rounds):
        for case in cases:
            if case in without:
                continue
            try:
                yield case, run(case)
            except DoesNotFitError:
                without.add(case)
                yield case, None


def collected(title: str, cases: list[str], rounds: int, run: Run) -> dict[str, list[Steady]]:
    """Run them, telling of each on standard error as it ends."""
    found: dict[str, list[Steady]] = {case: [] for case in cases}
    for case, steady in in_turns(cases, rounds, run):
        figure = f"{steady.tokens_per_s:,.0f} tokens/s" if steady else "does not fit"
        print(f"{title}, {case}: {figure}", file=sys.stderr, flush=True)
        found[case] += [steady] if steady else []
    return found


def as_rows(found: Mapping[str, list[Steady]]) -> list[list[str]]:
    """Tokens a second of each round, their ratio to the first case's, seconds of a step, memory."""
    base = next(iter(found.values()))
    rows = []
    for case, rounds in found.items():
        if not rounds:
            rows.append([case, "does not fit", "", "", ""])
            continue
        each = ", ".join(f"{steady.tokens_per_s:,.0f}" for steady in rounds)
        step = sum(steady.step_s for steady in rounds) / len(rounds)
        ratio = f"{ratio_of(rounds, base):.3f}" if base else ""
        memory = f"{max(steady.memory_gib for steady in rounds):.2f}"
        rows.append([case, each, ratio, f"{step:.4f}", memory])
    return rows


def ratio_of(rounds: list[Steady], base: list[Steady]) -> float:
    """How many times as fast as the base, over the rounds that both were in."""
    both = list(zip(rounds, base, strict=False))
    return sum(other.step_s for _, other in both) / sum(mine.step_s for mine, _ in both)


def shown(title: str, found: Mapping[str, list[Steady]]) -> str:
    header = [title, "tokens/s", f"times {next(iter(found))}", "step s", "GiB"]
    return as_table(header, as_rows(found))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="job files; default: 1b and 8b-l8")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--cases", nargs="+", choices=[*PLAIN, *OURS], default=USUAL, metavar="CASE")
    parser.add_argument("--whole-8b", action="store_true", help="llama3-8b on one card, in fp8")
    parser.add_argument("--small", action="store_true", help="a tiny model, on whatever there is")
    parser.add_argument("--compiled-in", metavar="FOLDER", help="keep what is compiled there")
    parser.add_argument("--json", metavar="FILE", help="write all figures there, after each job anew")
    asked, overrides = parser.parse_known_args()
    try:
        refuse(unwritable(asked.json, "--json"))
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2

    def words_for(settings: Mapping[str, object]) -> list[str]:
        small = shrunk(settings) | {"training.global_batch": 2}
        return [*words_of(small if asked.small else settings), *overrides]

    def whole(case: str) -> Steady:
        return timed(words_for({**EIGHT_B, **WHOLE[case]}), asked.steps, asked.compiled_in)

    def of(job: str) -> Run:
        def one(case: str) -> Steady:
            words = [job, *words_for(OURS.get(case, {}))]
            if case in OURS:
                return timed(words, asked.steps, asked.compiled_in)
            alone = [sys.executable, "-m", "benchmarks.plain_loop", *words, *PLAIN[case]]
            printed = output_of([*alone, "--steps", str(asked.steps)], asked.compiled_in)
            return Steady(**json.loads(printed.splitlines()[-1]))

        return one

    card = machine()
    figures: dict[str, Any] = asdict(card)
    tables = [str(card)]
    turns: list[tuple[str, list[str], int, Run]]
    if asked.whole_8b:
        turns = [("llama3-8b", list(WHOLE), 1, whole)]
    else:
        turns = [(Path(job).stem, asked.cases, asked.rounds, of(job)) for job in asked.jobs or JOBS]
    for title, cases, rounds, run in turns:
        found = collected(title, cases, rounds, run)
        tables.append(shown(title, found))
        figures[title] = {case: [asdict(steady) for steady in rounds] for case, rounds in found.items()}
        if asked.json:
            Path(asked.json).write_text(json.dumps(figures, indent=1) + "\n")
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
