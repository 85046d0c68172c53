"""What is saved from forward to backward; and segments that promise it, and run forward again instead."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.replay.graph import Tensor
    from fivefold.replay.tape import Tape


class Saved:
    """Tensors kept for one node, or promises of them."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: list[Any]):
        self._tensors = tensors

    def __getitem__(self, index: int) -> Tensor:
        kept = self._tensors[index]
        tensor: Tensor = kept.fetch() if isinstance(kept, Promise) else kept
        return tensor

    def fetch(self) -> None:
        """Have all of them, made again where they were only promised."""
        for index in range(len(self._tensors)):
            self[index]

    def __add__(self, other: Saved) -> Saved:
        return Saved(self._tensors + other._tensors)


class _Enough(Exception):  # noqa: N818
    """Everything that was promised has been made again."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Promise:
    """In place of a tensor saved inside a recomputed segment."""

    frame: Frame
    tensor: Tensor | None = None

    def fetch(self) -> Tensor:
        if self.tensor is None:
            self.frame.run_again()
        assert self.tensor is not None
        return self.tensor


@dataclass(eq=False)
class Frame:
    """One segment that backward runs forward again, when it first needs something of it."""

    tape: Tape
    again: Callable[[], Any]
    selective: bool = False
    kept: list[Tensor] = field(default_factory=list)
    promises: list[Any] = field(default_factory=list)
    made: int = -1

    def save(self, tensors: list[Tensor | None]) -> Saved:
        if self.made < 0:
            found = [None if tensor is None else Promise(self) for tensor in tensors]
            self.promises += [weakref.ref(promise) for promise in found if promise is not None]
            return Saved(found)
        for tensor in tensors:
            if tensor is None:
                continue
            promise = self.promises[self.made]()
            if promise is not None:
                promise.tensor = tensor.detached()
            self.made += 1
            if self.made == len(self.promises):
                raise _Enough
        return Saved([])

    def run_again(self) -> None:
        self.made = 0
        self.tape.frames.append(self)
        try:
            self.again()
        except _Enough:
            pass
        finally:
            self.tape.frames.pop()
            self.made = -1
