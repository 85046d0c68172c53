"""Traces in Chrome's format, made by hand: what torch's profiler would write of a step or two."""

from __future__ import annotations

from typing import Any

MAIN, AUTOGRAD, GLOO = 100, 101, 102
COMPUTE, SENDS = 7, 20
"""Streams of a GPU."""

FORWARD, REDUCTION, NORM, UPDATE = "forward and backward", "gradient reduction", "loss and norm", "optimizer"


class Trace:
    """Events are added by when they start and end, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {}}
        ]
        self._launched = 0

    def add(self, cat: str, name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> None:
        times = {"ts": start, "dur": end - start}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args})

    def step(self, number: int, start: float, end: float) -> None:
        self.add("user_annotation", f"fivefold: step {number}", start, end)
        self.add("gpu_user_annotation", f"fivefold: step {number}", start + 1, end + 1, COMPUTE)

    def phase(self, name: str, start: float, end: float) -> None:
        self.add("user_annotation", f"fivefold: {name}", start, end)

    def operator(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.add("cpu_op", name, start, end, thread)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        launched: float,
        thread: int = MAIN,
        stream: int = COMPUTE,
        cat: str = "kernel",
    ) -> None:
        """A kernel, and the call of the host that started it."""
        self._launched += 1
        self.add(
            "cuda_runtime", "cudaLaunchKernel", launched, launched + 0.5, thread, correlation=self._launched
        )
        self.add(cat, name, start, end, stream, correlation=self._launched, stream=stream)

    @property
    def told(self) -> dict[str, Any]:
        return {"schemaVersion": 1, "traceEvents": self.events, "traceName": "made by hand"}
