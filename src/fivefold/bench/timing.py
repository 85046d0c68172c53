"""Seconds of one call, on whatever device it computes."""

import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]

WINDOW = 0.03
"""Seconds in a row that are timed as one. Ranks that share a core take turns of some milliseconds: a shorter
call seldom sees the others' turn, though it waits for it as often."""
HEAT = 0.1
"""Seconds of work before a window on a GPU. At its limit of power it lowers its clock after 40 to 80 ms
(large products on an H200: 81% of the peak before, 70% from then on), and training goes on for longer."""


def seconds_of(call: Call, device: torch.device, calls: int) -> float:
    """Seconds of one of `calls` calls in a row, the device's own work included."""
    if device.type == "cuda":
        return _seconds_on_gpu(call, calls)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _seconds_on_gpu(call: Call, calls: int) -> float:
    """By events on the stream, so that the host runs ahead as it does in training."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(calls):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / calls


def window_of(call: Call, device: torch.device) -> float:
    """Seconds of one of the calls that fit into a window, one at least; on a GPU after others for a while."""
    if device.type == "cuda":
        once = max(_seconds_on_gpu(call, 1), 1e-7)
        for _ in range(round(HEAT / once)):
            call()
        return _seconds_on_gpu(call, max(1, round(WINDOW / once)))
    start = time.perf_counter()
    calls, spent = 0, 0.0
    while spent < WINDOW:
        call()
        calls += 1
        spent = time.perf_counter() - start
    return spent / calls
