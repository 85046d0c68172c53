"""The largest micro-batch of a job that fits on this card, as it was and as it can be.

    python -m benchmarks.largest_batch [JOB] [--cases before after] [--json FILE] [--section.key=value ...]
    python -m benchmarks.largest_batch --setting "loss alone: training.loss_chunk=1024"

Each try is a run of a few steps in a process of its own, whose whole batch is one micro-batch; running out of
memory is an answer. Sizes double until one does not fit. Between the largest that does and the smallest that
does not, the next is where a line through the last two peaks meets the card's memory, or else the middle.

before     the loss of all tokens at once, moments in float32
after      the loss in chunks, moments in bf16
--setting  one more case: a name, a colon, and keys of the job with their values
--small    with a model that any machine trains in seconds, and `--most` in place of memory
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.trained import DoesNotFitError, Steady, machine, shrunk, timed, words_of
from fivefold.problems import BadInput, Problem, refuse, unwritable
from fivefold.report.table import as_table

Try = Callable[[int], Steady]
"""Trains with a micro-batch of so many sequences. Raises `DoesNotFitError`."""

JOB = str(Path(__file__).parent / "h200_1b.toml")
CASES: dict[str, Mapping[str, object]] = {
    "before": {"training.loss_chunk": 0, "optimizer.states": "fp32"},
    "after": {"training.loss_chunk": 2048, "optimizer.states": "bf16"},
}
MOST = 256
USABLE = 0.97
"""Of a card's memory: what is left by its driver, and by gaps between tensors."""


def largest(attempt: Try, first: int, most: int, memory_gib: float | None) -> dict[int, Steady]:
    """Every size that fitted, by size; empty where not even one sequence does.

    first       the size to begin with
    most        no more than this is tried
    memory_gib  the card's, where it is known
    """
    fitted: dict[int, Steady] = {}
    above, size = most + 1, min(first, most)
    while size < above:
        try:
            fitted[size] = attempt(size)
        except DoesNotFitError:
            above = size
        size = following(fitted, above, most, memory_gib)
    return dict(sorted(fitted.items()))


def following(fitted: Mapping[int, Steady], above: int, most: int, memory_gib: float | None) -> int:
    """The next size to try; `above`, the smallest that is known or not allowed to fit, when there is none."""
    low = max(fitted, default=0)
    if low + 1 >= above:
        return above
    guess = None if memory_gib is None else on_the_line(fitted, USABLE * memory_gib)
    if guess is not None and guess < above:
        return max(guess, low + 1)  # where it has it that nothing more fits, one more try shows it
    if fitted and above > most:
        return min(2 * low, most)
    return (low + above) // 2


def on_the_line(fitted: Mapping[int, Steady], memory_gib: float) -> int | None:
    """The size that would fill some memory, if the two largest peaks go on as a line."""
    if len(fitted) < 2:
        return None
    smaller, larger = sorted(fitted)[-2:]
    each = (fitted[larger].memory_gib - fitted[smaller].memory_gib) / (larger - smaller)
    return None if each <= 0 else larger + math.floor((memory_gib - fitted[larger].memory_gib) / each)


def setting_of(text: str) -> tuple[str, dict[str, object]]:
    """`name: key=value key=value` -> the name, and the keys with their values. Raises `BadInput`."""
    name, colon, keys = text.partition(":")
    pairs = [word.partition("=") for word in keys.split()]
    if not (colon and name.strip() and pairs and all(middle and value for _, middle, value in pairs)):
        problem = Problem("--setting", f"'{text}' is no case", 'Write "name: section.key=value ...".')
        raise BadInput([problem])
    return name.strip(), {key: value for key, _, value in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", default=JOB, metavar="JOB", help="default: the 1b job")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--setting", action="append", default=[], help="one more case")
    parser.add_argument("--first", type=int, default=2, help="the size to begin with; default: %(default)s")
    parser.add_argument("--most", type=int, default=MOST, help="the largest to try; default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="of each run; default: %(default)s")
    parser.add_argument("--small", action="store_true", help="a tiny model, on whatever there is")
    parser.add_argument("--compiled-in", metavar="FOLDER", help="keep what is compiled there")
    parser.add_argument("--json", metavar="FILE", help="write all figures there, after each case anew")
    asked, overrides = parser.parse_known_args()
    try:
        refuse(unwritable(asked.json, "--json"))
        cases = {name: CASES[name] for name in asked.cases} | dict(map(setting_of, asked.setting))
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    card = machine()
    figures: dict[str, Any] = {**asdict(card), "cases": {}}
    rows = []
    for name, settings in cases.items():

        def attempt(size: int, name: str = name, settings: Mapping[str, object] = settings) -> Steady:
            print(f"{name}: {size} ...", file=sys.stderr, flush=True)
            own = shrunk(settings) if asked.small else settings
            batch = {"training.global_batch": size, "training.micro_batch": size}
            return timed([asked.job, *words_of({**own, **batch}), *overrides], asked.steps, asked.compiled_in)

        found = largest(attempt, asked.first, asked.most, card.memory_gib)
        figures["cases"][name] = {
            "settings": settings,
            "fitted": {size: asdict(each) for size, each in found.items()},
        }
        if asked.json:
            Path(asked.json).write_text(json.dumps(figures, indent=1) + "\n")
        rows.append([name, *_cells(found)])
    print(card)
    print(as_table(["case", "largest", "GiB", "tokens/s"], rows))
    return 0


def _cells(found: Mapping[int, Steady]) -> list[str]:
    if not found:
        return ["none", "", ""]
    size = max(found)
    return [str(size), f"{found[size].memory_gib:.2f}", f"{found[size].tokens_per_s:,.0f}"]


if __name__ == "__main__":
    sys.exit(main())
