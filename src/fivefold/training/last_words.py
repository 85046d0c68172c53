"""What a run that was ended by a signal leaves behind: said once, with the command to go on."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.storage.folder import saved_steps
from fivefold.training.lines import read_lines
from fivefold.training.samples import FILE
from fivefold.training.stopping import Stopped


@contextmanager
def last_words(folder: Path, attempt: int) -> Iterator[None]:
    """Say what stands when the block is ended by a signal; where nothing was lost, the exit code is 0.

    attempt  the one that is under way: steps that it took and did not save are lost
    """
    try:
        yield
    except Stopped as stopped:
        text, lost = standing(folder, attempt)
        print(f"{stopped}: {text}", file=sys.stderr)
        stopped.told = True
        if not lost:
            stopped.code = 0
        raise


def standing(folder: Path, attempt: int) -> tuple[str, bool]:
    """Which checkpoint stands, in words; and whether there is none, or steps since then are lost."""
    saved = saved_steps(folder)
    if not saved:
        return "nothing was saved.", True
    steps = [line["step"] for line in read_lines(folder / FILE) if line.get("attempt") == attempt]
    lost = max(0, max(steps, default=0) - saved[-1])
    since = f"; steps since then that are lost: {lost}" if lost else ", and nothing was lost"
    return (
        f"the checkpoint of step {saved[-1]} stands{since}. To go on: fivefold train {folder}",
        lost > 0,
    )
