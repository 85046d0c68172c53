"""Attention over a sequence that several ranks hold in consecutive parts, by exchanging heads for tokens.

One all-to-all gives each rank the whole sequence for some of the heads; it attends there as one process
would, with the ordinary core; a second all-to-all takes the results back to the ranks that hold the tokens.

What is sent lies token by token. So what comes is the whole sequence in its order, which the core takes as it
is; and a kernel that gives its result the order of its queries gives what is to be sent back.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.context import sent_kv_heads
from fivefold.comm.collectives import all_to_all
from fivefold.models.attention import Context


class UlyssesCore(nn.Module):
    """In place of the `AttentionCore` that it holds, on the tokens of this rank."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        self.core, self.group = core, group

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """query [B, H, S/cp, D]; key, value [B, K, S/cp, D] with K dividing H. Returns [B, H, S/cp, D]."""
        ranks = self.group.size()
        repeats = int(sent_kv_heads(key.shape[1], ranks)) // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        # For each rank its heads of every token: [ranks, S/cp, B, heads of one rank, D].
        parts = [x.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4) for x in (query, key, value)]
        even = [1] * ranks
        received = all_to_all(torch.cat(parts, 3), self.group, even, even)
        heads = received.split([part.shape[3] for part in parts], 3)
        mixed: Tensor = self.core(*(x.flatten(0, 1).permute(1, 2, 0, 3) for x in heads), context)
        back = all_to_all(mixed.permute(2, 0, 1, 3).unflatten(0, (ranks, -1)), self.group, even, even)
        # [ranks, S/cp, B, heads, D] -> a token's heads side by side, as the projection behind wants them.
        return back.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)
