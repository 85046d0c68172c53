"""Whether what `plan` says hangs together, of requests from 2 to 16,384 devices.

    python -m benchmarks.plan_agrees
    python -m benchmarks.plan_agrees 8b@8 mixtral@64

Of each request:

    front    no layout of the front is faster than the best
    compile  the default is as fast as the faster of --compile and --no-compile
    why      --why with the degrees of any row shown finds a layout as fast as that row
    time, memory  `simulate` says the same of the job that is written

Exit code 1 where one of them is not so.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fivefold.config import dump_toml, load
from fivefold.planner.answer import Answer
from fivefold.planner.keys import DEGREES, as_sections
from fivefold.planner.request import Request
from fivefold.report.simulated_job import asked, step_shown

ROUNDING = 1 + 1e-9
ALLOWED = {"front": ROUNDING, "compile": 1.001, "why": ROUNDING, "time": 1.001, "memory": 1.001}
"""What -> how many times as large as it should be a figure may be."""


def request(model: str, gpus: int, cluster: str = "dgx-h100", global_batch: int | None = None) -> Request:
    return Request(model=model, hf=None, cluster=cluster, gpus=gpus, global_batch=global_batch)


REQUESTS = {
    **{f"8b@{gpus}": request("llama3-8b", gpus) for gpus in (2, 4, 8, 64, 128)},
    **{f"70b@{gpus}": request("llama3-70b", gpus) for gpus in (64, 256, 1024)},
    **{f"405b@{gpus}": request("llama3-405b", gpus, "llama3", 2048) for gpus in (1024, 16_384)},
    "mixtral@64": request("mixtral-8x7b", 64),
    "gpt3@1024": request("gpt3-175b", 1024, "dgx-a100"),
}


def excesses(asking: Request) -> Iterator[tuple[str, float]]:
    """What -> how many times as large as it should be, at the worst."""
    answer = asking.answer()
    assert answer.best is not None, "nothing fits"
    best = answer.best.step_time
    yield "front", max(best / planned.step_time for planned in answer.searched.front)
    found = [replace(asking, compile=compiled).answer().best for compiled in (False, True)]
    yield "compile", max(best / planned.step_time for planned in found if planned)
    yield "why", max(_by_degrees(answer))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(dump_toml(asking.job(answer)))
        simulated = step_shown(asked(load(str(path), None, []), None, None)).figures
    for what, planned in (("time", best), ("memory", answer.best.memory_gib)):
        said = simulated["step_time_s" if what == "time" else "memory_gib"]
        yield what, max(said / planned, planned / said)


def _by_degrees(answer: Answer) -> Iterator[float]:
    """Of each row that is shown: the best time with its degrees over its own."""
    rows = [*answer.searched.best, *answer.searched.front]
    keys = [as_sections(planned.setup)["layout"] for planned in rows]
    degrees = [tuple((name, row[name]) for name in DEGREES) for row in keys]
    known = {given: answer.best_with(dict(given)).best[0].step_time for given in set(degrees)}
    for planned, given in zip(rows, degrees, strict=True):
        yield known[given] / planned.step_time


def main() -> int:
    failed = False
    print("request", *ALLOWED, "seconds", sep="\t")
    for name in sys.argv[1:] or REQUESTS:
        started = time.process_time()
        found = dict(excesses(REQUESTS[name]))
        wrong = [what for what, excess in found.items() if excess > ALLOWED[what]]
        failed = failed or bool(wrong)
        cells = (f"{excess - 1:+.3%}" for excess in found.values())
        print(name, *cells, f"{time.process_time() - started:.0f}", *wrong, sep="\t", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
