"""How long training waits for a checkpoint: written beside it, written before it goes on, and a plain file.

    python -m benchmarks.checkpoints --folder /data --rounds 3

Prints a line a round: seconds that training waits when the checkpoint is written in the background, when it
is not, and what writing as many bytes into one file takes. All of them end with everything on the disk.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fivefold.comm.world import device_kind
from fivefold.config import Job, resolve
from fivefold.storage.tensors import as_bytes
from fivefold.training.build import build
from fivefold.training.checkpoint import Progress, Saver

CHUNK = 16 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=10, help="of a model 1024 wide: 200 MB of state each")
    given = parser.parse_args()
    kind = device_kind()
    sizes = {
        "vocab_size": 8192,
        "dim": 1024,
        "layers": given.layers,
        "heads": 16,
        "kv_heads": 16,
        "ffn": 4096,
    }
    training = {"seq_len": 256, "precision": "fp32"}
    job = Job.model_validate({"model": sizes | {"max_seq_len": 256}, "training": training})
    built = build(resolve(job, 1, kind), torch.device(kind))
    run = Path(tempfile.mkdtemp(prefix="fivefold-", dir=given.folder))
    beside, before = Saver(built, run / "a", 1), Saver(built, run / "b", 1, background=False)
    print("state    beside  before  plain file  beside/before  before/plain")
    try:
        for step in range(given.rounds + 1):
            stall = beside.save(Progress(step, 0))
            beside.wait()
            whole = before.save(Progress(step, 0))
            before.wait()
            size = before.outcomes[-1].bytes
            plain = written(run / "plain", as_bytes(torch.full((size,), step, dtype=torch.uint8)))
            if step:  # the first one makes buffers
                ratios = f"{stall / whole:13.1%} {whole / plain:13.2f}"
                print(f"{size / 1e9:4.2f} GB {stall:6.2f} {whole:7.2f} {plain:9.2f} s {ratios}", flush=True)
    finally:
        shutil.rmtree(run)


def written(path: Path, content: Any) -> float:
    """Seconds that it takes to bring these bytes to the disk."""
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(content), CHUNK):
            file.write(content[start : start + CHUNK])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


if __name__ == "__main__":
    main()
