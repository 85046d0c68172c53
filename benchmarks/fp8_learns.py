"""What a model loses by computing in 8 bits: the loss on held-out documents after training `--preset tiny`.

    python -m benchmarks.fp8_learns [--steps 300] [--layers 8]

In bf16, and in fp8 tensorwise and rowwise, with all layers of the blocks (`fp8_small`), on one process;
on a CPU products in 8 bits are emulated. Exit 1 when a loss is off by more than 1%.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fivefold import read_metrics

SIZES = ["--training.global_batch=8", "--training.seq_len=64", "--optimizer.lr=0.002"]
IN_BITS = ["--training.fp8_small=true"]
KINDS = {
    "bf16": ["--training.precision=bf16"],
    "tensorwise": ["--training.fp8=tensorwise", *IN_BITS],
    "rowwise": ["--training.fp8=rowwise", *IN_BITS],
    "tensorwise, head": ["--training.fp8=tensorwise", "--training.fp8_head=true", *IN_BITS],
}
MOST = 0.01


def held_out(words: list[str], steps: int) -> float:
    """The loss on held-out documents after some steps."""
    settings = [f"--training.steps={steps}", f"--training.validate_every={steps}"]
    command = [sys.executable, "-m", "fivefold", "train", "--preset", "tiny", "--nproc", "1", *SIZES]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        more = ["--training.validate_batches=32", "--checkpoint.keep=0", "--run", str(run)]
        subprocess.run([*command, *words, *settings, *more], check=True, capture_output=True)
        found = [line.val_loss for line in read_metrics(run) if line.val_loss is not None]
    return float(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    asked = parser.parse_args()
    steps, layers = asked.steps, f"--model.layers={asked.layers}"
    print(f"{'':18}{'loss':>9}{'off by':>9}{'seconds':>9}")
    base, good = 0.0, True
    for kind, words in KINDS.items():
        started = time.perf_counter()
        loss = held_out([*words, layers], steps)
        base = base or loss
        off, seconds = loss / base - 1, time.perf_counter() - started
        print(f"{kind:18}{loss:9.4f}{off:9.2%}{seconds:9.0f}", flush=True)
        good &= abs(off) <= MOST
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
