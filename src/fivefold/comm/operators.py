"""Operators of our own: one operation to compilers and to selective recomputation, whatever runs inside.

What such an operator sends, it sends from inside, where a dispatch mode does not look. `inside` gives the
plain function, so that a mode may run that in the operator's place and see everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "fivefold"

_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator `fivefold::NAME` that changes none of its arguments.

    schema  its arguments and results as torch writes them: "(Tensor x, str group) -> Tensor"
    fake    takes the same arguments and returns empty tensors like the results
    """

    def register(function: Callable[..., Any]) -> Any:
        name = function.__name__
        made = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema)
        made.register_fake(fake)
        _FUNCTIONS[getattr(getattr(torch.ops, NAMESPACE), name).default] = function
        return made

    return register


def inside(operation: Any) -> Callable[..., Any] | None:
    """The function that one of our operators runs; None for any other operation."""
    return _FUNCTIONS.get(operation)
