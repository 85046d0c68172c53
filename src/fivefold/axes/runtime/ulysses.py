"""Attention over a sequence that several ranks hold in consecutive parts, by exchanging heads for tokens.

One all-to-all gives each rank the whole sequence for some of the heads; it attends there as one process
would, with the ordinary core; a second all-to-all takes the results back to the ranks that hold the tokens.
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
        # Heads first, those of each rank together: [ranks, heads of one rank, B, S/cp, D].
        parts = [x.transpose(0, 1).unflatten(0, (ranks, -1)) for x in (query, key, value)]
        sizes = [part.shape[1] for part in parts]
        even = [1] * ranks
        received = all_to_all(torch.cat(parts, 1), self.group, even, even)
        # [ranks, heads, B, S/cp, D] -> [B, heads, S, D]: ranks hold the sequence one after the other.
        whole = received.permute(2, 1, 0, 3, 4).flatten(2, 3)
        mixed: Tensor = self.core(*whole.split(sizes, 1), context)
        back = all_to_all(mixed.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4), self.group, even, even)
        return back.flatten(0, 1).transpose(0, 1)
