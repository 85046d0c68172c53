"""Pieces of tensors in host memory, on the device while something works on them; both ways at once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor


class Transfers:
    """Brings pieces to the device and back, one after the other. A context: when it is left, all are back.

    On a GPU they travel on a stream of their own in each direction: the host runs ahead, so that one piece
    comes and another goes while a third is worked on, in as many sets of buffers. Elsewhere the same copies
    are made one by one.
    """

    def __init__(self, device: torch.device, dtypes: Mapping[str, torch.dtype], most: int, sets: int):
        """`dtypes`: of the tensors that travel, by name; `most`: elements of the largest piece."""
        self.sets = [
            {name: torch.empty(most, dtype=dtype, device=device) for name, dtype in dtypes.items()}
            for _ in range(sets)
        ]
        self.turn = 0
        self.lanes = _Lanes(device, sets) if device.type == "cuda" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.lanes is not None:
            self.lanes.wait()

    @contextmanager
    def of(self, there: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """A piece on the device, by name, to be changed there; `there`: in host memory, each in one run."""
        number, self.turn = self.turn % len(self.sets), self.turn + 1
        here = {name: self.sets[number][name][: tensor.numel()] for name, tensor in there.items()}
        come = [(here[name], there[name]) for name in there]
        go = [(there[name], here[name]) for name in there]
        if self.lanes is None:
            _copy(come)
            yield here
            _copy(go)
        else:
            self.lanes.bring(number, come)
            yield here
            self.lanes.take(number, go)


class _Lanes:
    """Streams of a GPU, and when the buffers of each set are free again."""

    def __init__(self, device: torch.device, sets: int):
        self.device = device
        self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # What had the buffers' memory before may still be computing.
        self.inward.wait_stream(torch.cuda.current_stream(device))
        self.free: list[torch.cuda.Event | None] = [None] * sets

    def bring(self, number: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self.inward):
            if (free := self.free[number]) is not None:
                self.inward.wait_event(free)
            _copy(pairs)
        torch.cuda.current_stream(self.device).wait_event(self.inward.record_event())

    def take(self, number: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.outward.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self.outward):
            _copy(pairs)
        self.free[number] = self.outward.record_event()

    def wait(self) -> None:
        """Until all is in host memory: others read it, and the buffers' memory is given away."""
        self.outward.synchronize()
        torch.cuda.current_stream(self.device).synchronize()


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
