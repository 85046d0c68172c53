"""An update with states on the card and in host memory, and what the link to the host can do.

    python -m benchmarks.offload [--job benchmarks/h200_1b.toml] [--updates 10] [--small]

Prints, for each kind of states, seconds of an update on the card, with `optimizer.offload`, and of the copies
alone at the rate that was measured before: both ways at once, from locked memory, in pieces as large as an
update's. If copies and updates overlap, the second is the longer of the first and the third. `--small` is for
a machine without a GPU: a small model, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fivefold.config import Job, load, resolve
from fivefold.ledger.offload import PART
from fivefold.replay.account import account
from fivefold.training.build import Built, build
from fivefold.training.host_tensors import zeros_on_host
from fivefold.training.updates.transfers import Transfers

SMALL = ["--training.seq_len", "64", "--training.precision", "bf16", "--data.source", "random"]
STATES = ("fp32", "bf16")


def seconds(run: Callable[[], Any], device: torch.device, times: int) -> float:
    """The median of some runs, after one that warms up."""
    found = []
    for _ in range(times + 1):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def link_rate(device: torch.device, size: int, times: int) -> float:
    """Bytes a second each way, of copies both ways at once of pieces as large as an update's."""
    count = max(4, size // 4 // PART)
    held = zeros_on_host(torch.Size([count, PART]), torch.float32, device)

    def there_and_back() -> None:
        with Transfers(device, {"piece": torch.float32}, PART, 3) as transfers:
            for row in held:
                with transfers.of({"piece": row}):
                    pass

    return held.nbytes / seconds(there_and_back, device, times)


def update_time(job: Job, device: torch.device, offload: bool, times: int) -> tuple[float, float]:
    """Seconds of an update, and GiB that are allocated on the card between updates, gradients included."""
    optimizer = job.optimizer.model_copy(update={"offload": offload})
    built: Built = build(job.model_copy(update={"optimizer": optimizer}), device)
    for holder in built.weights.holders:
        holder.grad = torch.full(holder.shape, 1e-3, dtype=holder.dtype, device=device)
    scale = torch.tensor(0.5, device=device)
    took = seconds(lambda: built.optimizer.step(1e-4, scale), device, times)
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return took, allocated / 2**30


def measured(job: Job, device: torch.device, times: int, size: int) -> dict[str, Any]:
    rate = link_rate(device, size, times)
    found: dict[str, Any] = {"link_gb_per_s_each_way": rate / 1e9}
    for states in STATES:
        optimizer = job.optimizer.model_copy(update={"states": states, "offload": True})
        each = job.model_copy(update={"optimizer": optimizer})
        on_host = account(each).on_host
        (plain, before), (offload, after) = (update_time(each, device, way, times) for way in (False, True))
        found[states] = {
            "update_s": plain,
            "update_offloaded_s": offload,
            "copies_s": on_host / rate,
            "on_host_gib": on_host / 2**30,
            "on_card_gib": before,
            "on_card_offloaded_gib": after,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", default=str(Path(__file__).with_name("h200_1b.toml")))
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not asked.small:
        raise SystemExit("there is no GPU here: --small tries it on the processor")
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    job = load(None, "tiny", SMALL) if asked.small else load(asked.job)
    size = (1 << 27) if asked.small else (1 << 31)
    job = resolve(job, 1, "cuda" if on_gpu else "cpu")
    print(json.dumps(measured(job, device, asked.updates, size), indent=2))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
