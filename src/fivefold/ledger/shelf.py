"""A place where named things lie, which remembers the most that ever lay there at once."""

from __future__ import annotations


class Shelf:
    """Named tensors of some size, in bytes."""

    def __init__(self) -> None:
        self.things: dict[str, int] = {}
        self.now = 0
        self.peak = 0

    def __contains__(self, name: str) -> bool:
        return name in self.things

    def put(self, name: str, size: int) -> None:
        """Hold `name` from now on; if it is there already, it now has this size."""
        self.now += size - self.things.get(name, 0)
        self.things[name] = size
        self.peak = max(self.peak, self.now)

    def take(self, *names: str) -> None:
        """Hold these no longer. What is not there is not missed."""
        for name in names:
            self.now -= self.things.pop(name, 0)
