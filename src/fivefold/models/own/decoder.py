"""A user's parts as the decoder that is trained, and their first values."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from fivefold.models.decoder import Decoder, Embedding, Head
from fivefold.models.loss import summed_cross_entropy
from fivefold.models.own.contract import made
from fivefold.models.own.spec import OwnSpec


class OwnDecoder(Decoder):
    """The parts of a user's model in the place of our own. Their names stay: `blocks.3.` and what follows.

    What a block is told of the batch beside its input are the documents, if it takes them.
    """

    def __init__(self, spec: OwnSpec):
        nn.Module.__init__(self)
        model = made(spec.module)
        self.spec = spec
        self.embedding = cast(Embedding, model.embedding)
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in enumerate(model.blocks)})
        self.head = cast(Head, model.head)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        boundaries: Tensor | None = None,
    ) -> Tensor:
        """As `Decoder.forward`. Positions are the embedding's or the blocks' own business, and not used."""
        x = tokens if self.embedding is None else cast(nn.Module, self.embedding)(tokens)
        x = self.run_blocks(x, cast(Any, documents))
        if self.head is None:
            return x
        logits: Tensor = cast(nn.Module, self.head)(x)
        return logits if targets is None else summed_cross_entropy(logits, targets)

    def run_block(self, block: nn.Module, x: Tensor, context: Any) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]; `context` is the batch's documents, [B, S] or None."""
        y: Tensor = block(x, documents=context) if cast(OwnSpec, self.spec).takes_documents else block(x)
        return y


def first_values(spec: OwnSpec, seed: int) -> dict[str, Tensor]:
    """Every parameter and buffer of the whole model by name, as its own constructor fills them.

    They depend on the seed alone, as long as the constructor draws its numbers from torch. On the CPU, in
    the constructor's own dtypes.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = made(spec.module)
    named = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}
