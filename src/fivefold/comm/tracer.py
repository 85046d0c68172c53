"""Write down every collective that this process takes part in, as it happens.

The ledger predicts messages; a tracer sees them. It watches the dispatcher, so it also sees what
FSDP sends from inside its hooks, forward and backward, and it does not change what runs. It counts the bytes
that are handed to a process group, whatever the operator that hands them over calls itself.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fivefold.comm.compat import FUNCTIONAL_NAMESPACE, TorchDispatchMode, group_named, unboxed_group
from fivefold.operators import collective, inside


@dataclass(frozen=True)
class Seen:
    """One collective: what, how many bytes of whole tensor, among which ranks."""

    operation: str
    payload: int
    group: str


def _bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in (nested) lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)


# Per operator of the `c10d` namespace: its name in the ledger, and which arguments hold the whole
# tensor. The same operators exist in torch 2.11 to 2.13.
_WHOLE_TENSOR: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "allreduce_": ("all_reduce", lambda args: args[0]),
    "_allgather_base_": ("all_gather", lambda args: args[0]),
    "allgather_": ("all_gather", lambda args: args[0]),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args: args[1]),
    "reduce_scatter_": ("reduce_scatter", lambda args: args[1]),
    "broadcast_": ("broadcast", lambda args: args[0]),
    "alltoall_base_": ("all_to_all", lambda args: args[1]),
    "alltoall_": ("all_to_all", lambda args: args[1]),
    "send": ("send", lambda args: args[0]),
    "recv_": ("recv", lambda args: args[0]),
    "reduce_": ("reduce", lambda args: args[0]),
    "scatter_": ("scatter", lambda args: args[1]),
    "gather_": ("gather", lambda args: args[1]),
    "barrier": ("barrier", lambda args: []),
}

# The same for the functional ones, whose input is a rank's own part.
_FUNCTIONAL: dict[str, tuple[str, bool]] = {
    "all_reduce": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
}


class Tracer(TorchDispatchMode):
    """Use as a context manager around the code to watch; then read `seen` or `traffic()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Seen] = []

    def name_of(self, group: dist.ProcessGroup) -> str:
        """What a group is called in `seen`."""
        return group.group_name

    def traffic(self) -> Counter[tuple[str, int, str]]:
        """How many times each (operation, payload bytes, group) was seen."""
        return Counter((message.operation, message.payload, message.group) for message in self.seen)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = inside(func)
        if plain is not None:  # what one of our own operators sends, it sends from inside
            with self:
                return plain(*args, **(kwargs or {}))
        if (ours := collective(func)) is not None:
            return self._look_inside(*ours, args)
        if func.namespace == "c10d":
            self.seen.append(self._describe(func.overloadpacket.__name__, args))
        elif func.namespace == FUNCTIONAL_NAMESPACE and func.overloadpacket.__name__ != "wait_tensor":
            self.seen.append(self._describe_functional(func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))

    def _look_inside(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """One collective by the name it goes by, of the bytes and among the ranks that its messages have."""
        before = len(self.seen)
        with self:
            result = plain(*args)
        sent, self.seen = self.seen[before:], self.seen[:before]
        groups = "+".join(sorted({message.group for message in sent}))
        self.seen.append(Seen(_FUNCTIONAL[name][0], sum(message.payload for message in sent), groups))
        return result

    def _describe_functional(self, name: str, args: tuple[Any, ...]) -> Seen:
        operation, is_part = _FUNCTIONAL.get(name, (name, False))
        group = args[-1] if isinstance(args[-1], dist.ProcessGroup) else group_named(args[-1])
        return Seen(operation, _bytes(args[0]) * (group.size() if is_part else 1), self.name_of(group))

    def _describe(self, name: str, args: tuple[Any, ...]) -> Seen:
        operation, whole = _WHOLE_TENSOR.get(name, (name, lambda args: []))
        groups = [group for group in map(unboxed_group, args) if group is not None]
        return Seen(operation, _bytes(whole(args)), self.name_of(groups[0]) if groups else "?")
