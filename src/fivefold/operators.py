"""Operators of our own: one operation to compilers and to selective recomputation, whatever runs inside.

What such an operator sends, it sends from inside, where a dispatch mode does not look. `inside` gives the
plain function, so that a mode may run that in the operator's place and see everything.
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "fivefold"

_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_COLLECTIVES: dict[Any, tuple[str, Callable[..., Any]]] = {}
_CHEAP: set[Any] = set()


def operator(
    fake: Callable[..., Any], collective: str | None = None, cheap: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator `fivefold::NAME` that changes none of its arguments. Its types are read.

    fake        takes the same arguments and returns empty tensors like the results
    collective  for an operator of such arguments that is one collective, however it does it: which one
    cheap       selective recomputation makes its results again; otherwise it keeps them
    """

    def register(function: Callable[..., Any]) -> Any:
        name = function.__name__
        made = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=())
        made.register_fake(fake)
        operation = getattr(getattr(torch.ops, NAMESPACE), name).default
        if collective is None:
            _FUNCTIONS[operation] = function
        else:
            _COLLECTIVES[operation] = collective, function
        if cheap:
            _CHEAP.add(operation)
        return made

    return register


def inside(operation: Any) -> Callable[..., Any] | None:
    """The function that one of our operators runs; None for any other operation."""
    return _FUNCTIONS.get(operation)


def is_costly(operation: Any) -> bool:
    """Whether an operation is one of ours whose results are worth keeping."""
    return operation.namespace == NAMESPACE and operation not in _CHEAP


def collective(operation: Any) -> tuple[str, Callable[..., Any]] | None:
    """Which collective one of our operators is, and the function that it runs; None for any other."""
    return _COLLECTIVES.get(operation)
