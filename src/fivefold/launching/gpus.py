"""The GPUs of a machine, as they are asked for: `8`, or with their kind `H100:8`."""

import re
from dataclasses import dataclass

from fivefold.problems import BadInput, Problem


@dataclass(frozen=True)
class Gpus:
    """So many on each machine; `kind` is empty where it was left open."""

    count: int
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}" if self.kind else str(self.count)


def read_gpus(text: str | None, ranks: int) -> Gpus:
    """One a rank where nothing was said; 0 is to train on CPUs. Raises `BadInput`."""
    if text is None:
        return Gpus(ranks)
    found = re.fullmatch(r"(?:([A-Za-z][\w.-]*):)?(\d+)", text)
    if not found:
        hint = "Write how many a machine has, or their kind too: --gpus 8, --gpus H100:8, --gpus 0 for none."
        raise BadInput([Problem("--gpus", f"'{text}' is not a number of GPUs", hint)])
    gpus = Gpus(int(found[2]), found[1] or "")
    if 0 < gpus.count < ranks:
        hint = f"A rank takes one GPU: use --gpus {ranks}, or --nproc-per-node {gpus.count}."
        raise BadInput([Problem("--gpus", f"{gpus.count}, but there are {ranks} ranks a machine", hint)])
    return gpus
