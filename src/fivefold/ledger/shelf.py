"""A place where named things lie, which remembers the most that ever lay there at once."""

from __future__ import annotations


class Shelf:
    """Named tensors of some size, in bytes."""

    def __init__(self) -> None:
        self.things: dict[str, int] = {}
        self.peak = 0

    def __contains__(self, name: str) -> bool:
        return name in self.things

    @property
    def now(self) -> int:
        return sum(self.things.values())

    def put(self, name: str, size: int) -> None:
        """Hold `name` from now on; if it is there already, it now has this size."""
        self.things[name] = size
        self.peak = max(self.peak, self.now)

    def take(self, *names: str) -> None:
        """Hold these no longer. What is not there is not missed."""
        for name in names:
            self.things.pop(name, None)
