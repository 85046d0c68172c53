"""What a model loses by computing in 8 bits: the loss on held-out documents after training `--preset tiny`.

    python -m benchmarks.fp8_learns [--steps 300] [--small] [--lr 0.001]

In bf16, and in fp8 tensorwise and rowwise, with all layers of the blocks (`fp8_small`), from the same weights
on the same batches, side by side in one process. `--small`: of 2 layers, 64 wide. On a CPU products in 8 bits
are emulated, which takes several times as long as bf16. Exit 1 when a loss is off by more than 1%.
Of a larger model on a GPU: `benchmarks/fp8_curves.py`.
"""

import argparse
import sys
import time

import torch

from fivefold.config import Job, load, resolve
from fivefold.training.build import build
from fivefold.training.learning_rate import learning_rate
from fivefold.training.run import corpus_of
from fivefold.training.validation import validate

KINDS = {
    "bf16": ["--training.precision=bf16"],
    "tensorwise": ["--training.fp8=tensorwise", "--training.fp8_small=true"],
    "rowwise": ["--training.fp8=rowwise", "--training.fp8_small=true"],
}
BATCH = 8
USUAL = [f"--training.global_batch={BATCH}", "--training.seq_len=32", "--training.validate_batches=64"]
SMALL = ["--model.layers=2", "--model.dim=64", "--model.heads=4", "--model.kv_heads=2", "--model.ffn=128"]
SMALL += ["--model.vocab_size=320", "--model.max_seq_len=64"]
MOST = 0.01


def jobs(steps: int, small: bool, lr: float = 0.001) -> dict[str, Job]:
    words = [
        *USUAL,
        f"--training.steps={steps}",
        f"--training.validate_every={steps}",
        *SMALL * small,
        f"--optimizer.lr={lr}",
    ]
    preset = None if small else "tiny"
    return {kind: resolve(load(None, preset, [*words, *of_kind]), 1) for kind, of_kind in KINDS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--small", action="store_true", help="a smaller model than tiny")
    parser.add_argument("--lr", type=float, default=0.001, help="the highest learning rate")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    built = {kind: build(job, device) for kind, job in jobs(asked.steps, asked.small, asked.lr).items()}
    corpus, seconds = corpus_of(built["bf16"].job), dict.fromkeys(KINDS, 0.0)
    losses = dict.fromkeys(KINDS, 0.0)
    with corpus.train_loader(global_batch=BATCH, micro_batch=BATCH, rank=0, ranks=1) as loader:
        for step in range(1, asked.steps + 1):
            batches = next(loader)
            for kind, each in built.items():
                started = time.process_time()
                rate = learning_rate(each.job.optimizer, step, asked.steps)
                losses[kind] = each.step(batches, rate, step).loss
                seconds[kind] += time.process_time() - started
            if step % 50 == 0:
                shown = ", ".join(f"{kind} {loss:.4f}" for kind, loss in losses.items())
                print(f"step {step}: {shown}", flush=True)
    print(f"{'':12}{'held out':>10}{'off by':>9}{'CPU s':>8}")
    base, good = 0.0, True
    for kind, each in built.items():
        loss = validate(each.job, each, corpus) or 0.0
        base = base or loss
        print(f"{kind:12}{loss:10.4f}{loss / base - 1:9.2%}{seconds[kind]:8.0f}", flush=True)
        good &= abs(loss / base - 1) <= MOST
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
