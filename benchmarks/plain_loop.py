"""Training as one writes it by hand for one card: what `benchmarks/yardstick.py` holds `fivefold train` to.

    python -m benchmarks.plain_loop benchmarks/h200_1b.toml [--separate] [--section.key=value ...]

Blocks and head compiled, cuDNN's attention, float32 weights under autocast, clipping, torch's fused AdamW,
random tokens. Projections of queries, keys and values are one product, and so are gate and up; `--separate`
computes them one by one, which shows what that is good for. Prints one line of JSON.
"""

import argparse
import json
import time
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.trained import Steady
from fivefold.comm.world import device_kind
from fivefold.config import Job, load, resolve
from fivefold.models.rope import rope_tables, rotate
from fivefold.models.spec import ModelSpec
from fivefold.training.metrics import peak_memory_gib

Rope = tuple[Tensor, Tensor]


class Projections(nn.Module):
    """Linear layers of one input: one product, or one for each of them."""

    def __init__(self, inputs: int, widths: list[int], separate: bool):
        super().__init__()
        self.widths = widths
        each = widths if separate else [sum(widths)]
        self.layers = nn.ModuleList(nn.Linear(inputs, width, bias=False) for width in each)

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [B, S, inputs] -> one [B, S, width] for each width."""
        results = [layer(x) for layer in self.layers]
        return results if len(results) == len(self.widths) else list(results[0].split(self.widths, -1))


class PlainBlock(nn.Module):
    def __init__(self, spec: ModelSpec, separate: bool):
        super().__init__()
        widths = [spec.heads * spec.head_dim, *[spec.kv_heads * spec.head_dim] * 2]
        self.head_dim = spec.head_dim
        self.attention_norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.qkv = Projections(spec.dim, widths, separate)
        self.output = nn.Linear(widths[0], spec.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.gate_up = Projections(spec.dim, [spec.ffn] * 2, separate)
        self.down = nn.Linear(spec.ffn, spec.dim, bias=False)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        parts = self.qkv(self.attention_norm(x))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        query, key = rotate(query, *rope), rotate(key, *rope)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x))
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

    def __init__(self, spec: ModelSpec, separate: bool = False):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleList(PlainBlock(spec, separate) for _ in range(spec.layers))
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


def run(job: Job, steps: int, separate: bool = False) -> Steady:
    """Train some steps of random tokens with a job's shapes; the whole batch at once."""
    spec, device = job.spec, torch.device(device_kind())
    with device:
        model = PlainModel(spec, separate)
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
    return Steady.of(times, shape[0] * shape[1], peak_memory_gib(device))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--separate", action="store_true", help="one product for each projection")
    asked, overrides = parser.parse_known_args()
    job = resolve(load(asked.job, overrides=overrides), 1)
    print(json.dumps(asdict(run(job, asked.steps, asked.separate))))


if __name__ == "__main__":
    main()
