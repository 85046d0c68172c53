"""`python -m tests.verification.drawn --jobs 200 --seed 0`: `verify` on drawn jobs, a line each.

Exit 1 if any was different or crashed. With `--precision job` each is verified in its own precision as well.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from fivefold.axes.layout import described
from fivefold.config import Job
from fivefold.problems import BadInput
from fivefold.training.failures import RanksFailed
from fivefold.verification import verify
from tests.verification.draw import drawn


def answer(job: Job, ranks: int, precision: str) -> tuple[str, str]:
    """(same, different, refused or crashed; what was said)."""
    try:
        verdict = verify(job, ranks, precision="job" if precision == "job" else "fp64")
    except BadInput as refusal:
        return "refused", str(refusal).replace("\n", " ")
    except RanksFailed as failure:
        return "crashed", str(failure)
    except Exception:
        return "crashed", traceback.format_exc()
    return "same" if verdict.ok else "different", verdict.sentence()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verification.drawn", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--precision", choices=("fp64", "job"), default="fp64")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    for number in range(given.first, given.first + given.jobs):
        job, ranks = drawn(number, given.seed)
        begun = time.monotonic()
        outcome, said = answer(job, ranks, given.precision)
        counts[outcome] += 1
        seconds = time.monotonic() - begun
        print(
            f"{number:4} {outcome:9} {seconds:5.1f} s  {job.spec.name}, {described(job)}: {said}", flush=True
        )
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return int(counts["crashed"] + counts["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
