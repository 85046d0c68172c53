"""`fivefold train` beside a plain PyTorch loop of the same shapes, in turns.

    python -m benchmarks.yardstick benchmarks/h200_1b.toml [--rounds 2] [--steps 40] [--section.key value ...]

Cards of one kind differ by some percent. So speed is told as a ratio to a plain loop on the same card: one
process, projections of queries, keys and values fused, gate and up fused, blocks and head compiled, cuDNN's
attention, float32 weights under autocast, clipping, torch's fused AdamW. Random tokens, the same number a
step; the median of the second half of the steps. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.config import Job, load, resolve
from fivefold.models.rope import rope_tables, rotate
from fivefold.models.spec import ModelSpec
from fivefold.training.metrics import read_metrics

Rope = tuple[Tensor, Tensor]


class PlainBlock(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.widths = [spec.heads * spec.head_dim, *[spec.kv_heads * spec.head_dim] * 2]
        self.head_dim = spec.head_dim
        self.attention_norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.qkv = nn.Linear(spec.dim, sum(self.widths), bias=False)
        self.output = nn.Linear(self.widths[0], spec.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.gate_up = nn.Linear(spec.dim, 2 * spec.ffn, bias=False)
        self.down = nn.Linear(spec.ffn, spec.dim, bias=False)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        parts = self.qkv(self.attention_norm(x)).split(self.widths, -1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        query, key = rotate(query, *rope), rotate(key, *rope)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        added: Tensor = self.down(F.silu(gate) * up)
        return x + added


class PlainHead(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.output = nn.Linear(spec.dim, spec.vocab_size, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """x [B, S, dim], targets [B, S] -> the mean loss, a scalar."""
        return F.cross_entropy(self.output(self.norm(x)).float().flatten(0, 1), targets.flatten())


class PlainModel(nn.Module):
    """A Llama, whole, as one would write it for one card."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleList(PlainBlock(spec) for _ in range(spec.layers))
        self.head = PlainHead(spec)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [B, S] -> the mean loss, a scalar."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        rope = rope_tables(self.spec, positions, torch.float32)
        x = self.embedding(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, rope)
        loss: Tensor = self.head(x, targets)
        return loss


def plain_step(job: Job, steps: int) -> float:
    """The median seconds of a step of the plain loop, of the second half of them."""
    spec, device = job.spec, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = PlainModel(spec)
        shape = (job.training.global_batch, job.training.seq_len)
        batches = [torch.randint(spec.vocab_size, (2, *shape)) for _ in range(4)]
    if job.training.compile:
        for module in (*model.blocks, model.head):
            module.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    kernels = [SDPBackend.CUDNN_ATTENTION] if device.type == "cuda" else [SDPBackend.FLASH_ATTENTION]
    times = []
    with sdpa_kernel(kernels):
        for step in range(steps):
            started = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(*batches[step % len(batches)])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()  # as every loop that logs its loss does: it waits for the step
            times.append(time.perf_counter() - started)
    return statistics.median(times[steps // 2 :])


def our_step(arguments: list[str], steps: int) -> float:
    """The median seconds of a step of `fivefold train`, of the second half of them."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*arguments, "--training.steps", str(steps), "--run", folder]
        subprocess.run([sys.executable, "-m", "fivefold", "train", *words], check=True, stdout=sys.stderr)
        records = read_metrics(Path(folder))
    return statistics.median(float(record["step_time_s"]) for record in records[steps // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("job")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plain", action="store_true", help="the plain loop alone, in this process")
    options, overrides = parser.parse_known_args()
    job = resolve(load(options.job, overrides=overrides), 1)
    if options.plain:
        print(plain_step(job, options.steps))
        return
    words = [options.job, "--steps", str(options.steps), *overrides]
    alone = [sys.executable, "-m", "benchmarks.yardstick", "--plain", *words]
    plain, ours = [], []
    for _ in range(options.rounds):
        printed = subprocess.run(alone, check=True, stdout=subprocess.PIPE, text=True).stdout
        plain.append(float(printed.splitlines()[-1]))
        ours.append(our_step([options.job, *overrides], options.steps))
    tokens = job.training.global_batch * job.training.seq_len
    told = {"plain_tokens_per_s": [tokens / t for t in plain], "tokens_per_s": [tokens / t for t in ours]}
    print(json.dumps(told | {"ratio": sum(plain) / sum(ours)}, indent=2))


if __name__ == "__main__":
    main()
