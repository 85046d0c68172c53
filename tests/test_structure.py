"""What holds for all of the source: where torch's private parts stand, no import cycle, no dead module."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping

import pytest
from torch import nn
from torch.utils.data import Dataset

import fivefold
from tests.source import FILES, imports, tree

# --- torch's private parts stand in one file ------------------------------------------------------------

COMPAT = "fivefold.comm.compat"
PUBLIC_ANYWAY = {"_asdict", "_current_frames", "_exit", "_fields", "_inheriting", "_make", "_replace"}
"""Not of torch: of named tuples, of `os` and `sys`, and of a process that `multiprocessing` is starting."""
PRIVATE_NAME = re.compile(r"torch(\.\w+)*\._\w[\w.]*|_c10d_\w+")
"""A module, or a namespace of operators."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_privately(tree: ast.AST) -> set[str]:
    """The private functions, fields and attributes that a file defines, the latter on `self` or `cls`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def bound_to_torch(tree: ast.AST) -> set[str]:
    """The names that a file's imports bind to torch, or to a module or a class of it."""
    return {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] == "torch"
    }


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Every use of a private name of torch in a file, or of a private name that the file does not define."""
    torch_names, known = bound_to_torch(tree), defined_privately(tree) | PUBLIC_ANYWAY
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                parts = f"{base}{alias.name}".split(".")
                if parts[0] == "torch" and any(map(is_private, parts)):
                    yield f"line {node.lineno}: imports {'.'.join(parts)}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = ast.unparse(node)
            of_torch = chain.split(".")[0] in torch_names
            if of_torch or node.attr not in known:
                yield f"line {node.lineno}: {chain}"
        elif isinstance(node, ast.Constant) and PRIVATE_NAME.fullmatch(str(node.value)):
            yield f"line {node.lineno}: names {node.value!r}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = getattr(node.args[1], "value", "")
            if is_private(str(name)) and name not in known:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def replaced_methods(kind: type) -> set[str]:
    """The private methods of a class that replace one of torch's."""
    above = [base for base in kind.__mro__[1:] if base.__module__.split(".")[0] == "torch"]
    mine = {name for name, value in vars(kind).items() if inspect.isroutine(value) and is_private(name)}
    return {name for name in mine for base in above if name in vars(base)}


def test_private_torch_names_stand_in_one_file() -> None:
    found = [f"{module}, {use}" for module in FILES if module != COMPAT for use in private_uses(tree(module))]
    advice = f"move into {COMPAT}, with the versions of torch it is for:"
    assert not found, "\n".join([advice, *found])


WITH_TRITON = {"fivefold.training.updates.kernels", "fivefold.axes.runtime.fp8_kernels"}
KERNELS = set() if importlib.util.find_spec("triton") else WITH_TRITON
"""What cannot be imported where there is no Triton."""


def test_no_private_method_of_torch_is_replaced() -> None:
    found = {}
    for module in FILES.keys() - {COMPAT, "fivefold.__main__", *KERNELS}:
        for kind in vars(importlib.import_module(module)).values():
            if inspect.isclass(kind) and kind.__module__ == module and (names := replaced_methods(kind)):
                found[f"{module}.{kind.__name__}"] = names
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import _distributed_c10d",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.distributed import _functional_collectives",
        "def late():\n    import torch.distributed._symmetric_memory as memory",
        "import torch\ntorch._foreach_mul_(x, 2)",
        "import torch\nrun = torch.ops._c10d_functional.all_reduce",
        "import torch\nkernel = torch.ops.aten._grouped_mm.default",
        "import torch\nx = torch._known(y)",
        "import torch.distributed as dist\ndist._known()",
        "from torch.distributed.device_mesh import DeviceMesh\nDeviceMesh._concatenate(x)",
        "PRELOAD = ['torch', 'torch._dynamo']",
        "if operation.namespace == '_c10d_functional':\n    pass",
        "x._is_view()",
        "self._parameters",
        "super()._apply(f)",
        "mesh['dp', 'cp']._flatten('dp_cp')",
        "schedule._warmup_p2p = f",
        "setattr(stage, '_inference_mode', 1)",
        "hooks = getattr(x, '_post_accumulate_grad_hooks', None)",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert len(list(private_uses(ast.parse(f"_known = 1\n{line}")))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.ops.aten.mm.default",
        "from torch.distributed.fsdp import FSDPModule",
        "'torch._dynamo takes a second to import'",
        "self._known = 1",
        "other._known()",
        "context._replace(rope=None)",
        "import os\nos._exit(1)",
        "x.__dict__",
        "getattr(self, '_known')",
        "for _, x in pairs:\n    pass",
    ],
)
def test_another_name_is_left_alone(line: str) -> None:
    assert list(private_uses(ast.parse(f"_known = 1\n{line}"))) == []


def test_our_own_private_names_are_known() -> None:
    source = "_a = 1\ndef _b(): x._no = 2\nclass _C:\n    _d: int = 0\n    def _e(self): self._f = 1"
    assert defined_privately(ast.parse(source)) == {"_a", "_b", "_C", "_d", "_e", "_f"}


def test_a_replaced_method_is_found() -> None:
    class Replaces(nn.Module):
        def _apply(self, fn, recurse=True):
            return self

        def _own(self):
            """No other class has it."""

    class Late(Replaces):
        def _get_name(self):
            return "late"

    class Plain(Dataset[int]):
        def _apply(self):
            """A module's, but this is none."""

    assert replaced_methods(Replaces) == {"_apply"}
    assert replaced_methods(Late) == {"_get_name"}
    assert replaced_methods(Plain) == set()


# --- imports ----------------------------------------------------------------------------------------------


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules each of which imports, in the end, all others of its set."""
    below = {module: reached(graph, graph[module]) for module in graph}
    found = {
        tuple(sorted(other for other in below[module] if module in below[other]))
        for module in graph
        if module in below[module]
    }
    return sorted(map(list, found))


def reached(graph: Mapping[str, set[str]], starts: set[str]) -> set[str]:
    """The modules that `starts` import in the end, themselves included."""
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        module = waiting.pop()
        if module in graph and module not in found:
            found.add(module)
            waiting += graph[module]
    return found


def test_no_import_cycle_between_modules() -> None:
    found = cycles(imports())
    assert not found, "\n".join(f"a cycle: {', '.join(cycle)}" for cycle in found)


def test_every_module_is_reached() -> None:
    starts = {
        "fivefold.__main__",
        "fivefold.cli",
        *(place.partition(":")[0] for place in fivefold._PLACES.values()),
    }
    # Importing a module imports the package that it is in.
    graph = {
        module: names | {name.rpartition(".")[0] for name in names} for module, names in imports().items()
    }
    dead = FILES.keys() - reached(graph, starts)
    assert not dead, "\n".join(f"nothing imports {module}" for module in sorted(dead))


def test_a_cycle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a", "f"}, "g": {"a"}}
    assert cycles(graph) == [["a", "b", "c"], ["d", "e"], ["f"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": {"elsewhere"}}) == []


def test_what_is_reached() -> None:
    graph = {"a": {"b"}, "b": {"elsewhere"}, "c": {"a"}}
    assert reached(graph, {"a"}) == {"a", "b"}
