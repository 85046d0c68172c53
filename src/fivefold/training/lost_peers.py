"""How a rank that a launcher started ends when it fails: soon, whatever its peers do.

The launcher starts ranks again when one of them has ended. Leaving the process group, or ending a checkpoint
that is being written, could wait for a rank on a host that is gone.
"""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.comm.world import World
from fivefold.problems import BadInput, BadNews
from fivefold.training.failures import LOST_PEER, RankFailure

GRACE_S = 10.0


@contextmanager
def ending_promptly(world: World, grace_s: float = GRACE_S) -> Iterator[None]:
    """When the block fails, end this process within `grace_s` seconds, even if something in it still waits.

    The loss of another rank is told in a line, as `BadNews`: its cause stands where that rank was.
    """
    try:
        yield
    except BadInput:  # all ranks have heard of it, and none waits
        raise
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        end = threading.Timer(grace_s, os._exit, (code,))
        end.daemon = True
        end.start()
        failure = RankFailure.of(world.rank, error)
        if isinstance(error, Exception) and failure.is_echo:
            raise BadNews(f"rank {world.rank} {LOST_PEER}: {_reason(failure)}") from None
        raise


def _reason(failure: RankFailure) -> str:
    """The first sentence of the message, without the place in torch's code."""
    first = next(iter(failure.message.strip().splitlines()), failure.type)
    return re.sub(r"^\[[^]]*\]\s*", "", first).split(". ")[0]
