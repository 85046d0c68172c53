"""Operators of our own: one operation from outside, and whoever wants to may look inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.operators import collective, inside, is_costly, operator


def twice_and_one(x: Tensor) -> Tensor:
    return x * 2 + 1


def gathered_alone(x: Tensor) -> Tensor:
    return x.repeat(2)


def twice(x: Tensor) -> Tensor:
    return x * 2


PLAIN = operator(torch.empty_like)(twice_and_one)
CHEAP = operator(torch.empty_like, cheap=True)(twice)
GATHER = operator(lambda x: x.new_empty(2 * len(x)), "all_gather")(gathered_alone)


class Seen(TorchDispatchMode):
    """Notes what is run; `look` runs the function of an operator in its place."""

    def __init__(self, look: bool):
        super().__init__()
        self.look, self.names = look, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.look and (function := inside(func)) is not None:
            with self:
                return function(*args, **(kwargs or {}))
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("look", "names"),
    [(False, ["fivefold.twice_and_one.default"]), (True, ["aten.mul.Tensor", "aten.add.Tensor"])],
)
def test_a_mode_sees_one_operation_or_all_that_is_inside(look: bool, names: list[str]) -> None:
    numbers = torch.arange(3.0)
    with Seen(look) as seen:
        found = PLAIN(numbers)
    assert found.tolist() == [1, 3, 5]
    assert seen.names == names


def test_a_collective_is_known_by_its_name_and_not_looked_into() -> None:
    operation = torch.ops.fivefold.gathered_alone.default
    assert collective(operation) == ("all_gather", gathered_alone)
    assert inside(operation) is None
    assert collective(torch.ops.fivefold.twice_and_one.default) is None
    assert collective(torch.ops.aten.mul.Tensor) is None
    ones = torch.ones(2)
    with Seen(look=True) as seen:
        found = GATHER(ones)
    assert found.tolist() == [1, 1, 1, 1]
    assert seen.names == ["fivefold.gathered_alone.default"]


def test_shapes_are_known_without_values() -> None:
    assert PLAIN(torch.empty(3, device="meta")).shape == (3,)
    assert GATHER(torch.empty(3, device="meta")).shape == (6,)


def test_what_is_cheap_says_so() -> None:
    assert CHEAP(torch.ones(2)).tolist() == [2, 2]
    assert is_costly(torch.ops.fivefold.twice_and_one.default)
    assert not is_costly(torch.ops.fivefold.twice.default)
    assert not is_costly(torch.ops.aten.mul.Tensor)
