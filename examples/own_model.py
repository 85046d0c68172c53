"""A model of your own, trained by four processes: two stages of a pipeline, each sharded over two ranks.

    python examples/own_model.py

The contract is three plain parts, `embedding`, `blocks` and `head`: see docs/own-model.md.
"""

import torch
from torch import Tensor, nn

import fivefold


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]: to each token, a gated mean of the tokens up to it."""
        gate, value = self.mix(self.norm(x)).chunk(2, dim=-1)
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return x + self.out(gate.sigmoid() * value.cumsum(1) / count[:, None])


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 64)  # tokens [B, S] -> x [B, S, dim]
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))  # each x -> x
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 257))  # x -> logits [B, S, vocabulary]


if __name__ == "__main__":
    layout = ["--layout.pp", "2", "--layout.dp_shard", "2", "--layout.zero", "3"]
    settings = ["--training.steps", "50", "--optimizer.lr", "0.01", "--data.separate_documents", "false"]
    job = fivefold.load_job(overrides=[*layout, *settings])
    print(fivefold.verify(job, model=OwnModel).sentence())
    print(fivefold.train(job, model=OwnModel))
