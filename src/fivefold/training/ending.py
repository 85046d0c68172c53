"""How replicas that train alone end after the same step, where one of them is asked to stop.

They meet in outer steps only, which may be minutes apart: too far for a request to stop. So they agree by way
of the store of the process group. A replica that learns of the request after its own part of a step says so,
and which step that was; it goes on when it knows of all others where they can stop. That is the step at which
they have learned of it, too; or the next one, of a replica that cannot move until this one does: before it
waits for others, a replica says where, and for which of their steps. All end after the latest of these steps.
Whichever way a replica has told it, the number is the same.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fivefold.comm.compat import rank_store

LOOK_S = 1.0
"""How often a replica looks whether another was asked to stop."""
POLL_S = 0.02


@dataclass
class Ending:
    """One rank's view of it. All ranks of a replica call `agreed` after the same step.

    store  where replicas tell each other
    """

    replica: int
    replicas: int
    store: Store
    _looked: float = field(default_factory=time.monotonic)

    @classmethod
    def opened(cls, replica: int, replicas: int) -> Ending:
        """In the store of all ranks, under a name of its own. Every rank must call it."""
        name: list[str | None] = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        return cls(replica, replicas, PrefixStore(f"ending {name[0]}", rank_store()))

    def asked_elsewhere(self) -> bool:
        """Whether another replica was asked to stop; looked up every `LOOK_S` seconds."""
        if time.monotonic() - self._looked < LOOK_S:
            return False
        self._looked = time.monotonic()
        return bool(self.store.check(["asked"]))

    def waits(self, step: int, needs: float) -> None:
        """After this step, this replica waits for what others do at the end of step `needs`.

        Half a step later is what comes after a step: to save, to validate. Others may then count on it
        to stop after the next step: there it looks, however lately it has looked before.
        """
        self._looked = -math.inf
        self.store.set(f"waits {self.replica}", f"{step} {needs}")

    def agreed(self, step: int) -> int:
        """After which step all replicas end, of one that has come to know of it in the middle of `step`.

        Its own part of the step is done, and nothing yet that another replica may wait for.
        """
        self.store.set(f"stops {self.replica}", str(step))
        self.store.set("asked", "")
        while None in (found := list(self._bounds(step))):
            time.sleep(POLL_S)
        return max(bound for bound in found if bound is not None)

    def _bounds(self, step: int) -> Iterator[int | None]:
        """By replica, after which step it can stop; None: it has not told yet."""
        for replica in range(self.replicas):
            if (stops := self._told(f"stops {replica}")) is not None:
                yield int(stops)
            elif (waits := self._told(f"waits {replica}")) is not None and float(waits.split()[1]) >= step:
                yield int(waits.split()[0]) + 1
            else:
                yield None

    def _told(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None
