"""Messages from one rank to another, which travel while the sender computes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """A tensor sent to one rank of a group and another, of the same shape, coming from a second one.

    Both travel from the moment this is made until `wait` returns. Over gloo, tensors of a GPU are taken to
    the CPU and back.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup, to: int, source: int):
        """x [...], any shape; `to` and `source` are ranks within `group`."""
        self.device = x.device
        staged = x.device.type == "cuda" and dist.get_backend(group) == "gloo"
        self.sent = x.cpu().contiguous() if staged else x.contiguous()  # kept until it has arrived
        self.coming = torch.empty_like(self.sent)
        self.works: list[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, group=group, group_peer=to),
                dist.P2POp(dist.irecv, self.coming, group=group, group_peer=source),
            ]
        )

    def wait(self) -> Tensor:
        """The tensor that came, on the device of the one that went."""
        for work in self.works:
            work.wait()
        return self.coming.to(self.device)
