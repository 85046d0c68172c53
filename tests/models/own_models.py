"""Models of a user's own that tests train, and some that break the contract."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM = 67, 24  # a prime, and a width that 4 ranks divide


class Lookup(nn.Module):
    """An embedding whose backward needs weights: ZeRO 3 must not have freed them for good."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 10)
        self.wider = nn.Linear(10, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.wider(self.tokens(tokens)))


class Waves(nn.Module):
    """A table without parameters that all blocks share, drawn by chance."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(64, DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class Block(nn.Module):
    """Attention that keeps documents apart, and a hidden layer; odd ones are wider."""

    def __init__(self, waves: Waves, hidden: int):
        super().__init__()
        self.waves = waves
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.up, self.down = nn.Linear(DIM, hidden), nn.Linear(hidden, DIM, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(self.waves(self.norm(x))).chunk(3, dim=-1)
        length = x.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None, :])
        x = x + F.scaled_dot_product_attention(query, key, value, visible)
        added: Tensor = self.down(F.gelu(self.up(x)))
        return x + self.scale * added


class Good(nn.Module):
    max_seq_len = 64

    def __init__(self) -> None:
        super().__init__()
        waves = Waves()
        self.embedding: Any = Lookup()
        self.blocks: Any = nn.ModuleList(Block(waves, 16 + 8 * (layer % 2)) for layer in range(4))
        self.head: Any = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY))


class Plain(Good):
    """One whose blocks take no documents."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))


def made_by_a_function() -> nn.Module:
    return Good()


# --- what breaks the contract ------------------------------------------------------------------------------


class NoEmbedding(Good):
    def __init__(self) -> None:
        super().__init__()
        del self.embedding


class NoHead(Good):
    def __init__(self) -> None:
        super().__init__()
        self.head = None


class ListOfBlocks(Good):
    def __init__(self) -> None:
        super().__init__()
        blocks = list(self.blocks)
        del self.blocks
        self.blocks = blocks


class EmptyBlocks(Good):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()


class Outside(Good):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(DIM))


class Tied(Good):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


class Frozen(Good):
    def __init__(self) -> None:
        super().__init__()
        self.head[1].bias.requires_grad_(False)


class Scalar(Good):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].scale = nn.Parameter(torch.tensor(1.0))


class NothingToTrain(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.ReLU())


class PlainTensor(Good):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].mask = torch.ones(4, 4)


class Dropping(Good):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Dropout(0.1))


class BatchNorm(Good):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(DIM, VOCABULARY))


class Mixed(Good):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(DIM, DIM))


class Narrowing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(DIM, DIM - 1))


class FlatHead(Good):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(DIM, VOCABULARY), nn.Flatten(1))


class FlatEmbedding(Good):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Flatten(1))


class SmallTable(Good):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY - 1, DIM)


class Unused(Good):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].forgotten = nn.Linear(DIM, DIM)


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x)
        return x


class ChangesInput(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(InPlace(DIM, DIM))


class FixedDtype(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class OneDtype(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(FixedDtype(DIM, DIM))


class TwoResults(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.LSTM(DIM, DIM))


class WantsArguments(Good):
    def __init__(self, layers: int):
        super().__init__()


class ShortTable(Plain):
    """Does not say so, but takes sequences up to 16."""

    max_seq_len = 1000

    def __init__(self) -> None:
        super().__init__()
        self.head = Positions()


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(16, DIM))
        self.out = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(x + self.table[: x.shape[1]])
        return logits


def returns_a_number() -> int:
    return 3


NOT_CALLABLE = 3
