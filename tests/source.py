"""Our own source files, and who imports whom: what the tests of structure read."""

from __future__ import annotations

import ast
from collections.abc import Collection
from functools import cache
from pathlib import Path

import fivefold

SOURCE = Path(fivefold.__file__).parent


def files() -> dict[str, Path]:
    """Every source file by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(("fivefold", *(part for part in parts if part != "__init__")))
        found[name] = path
    return found


FILES = files()


@cache
def tree(module: str) -> ast.Module:
    """A source file, parsed."""
    return ast.parse(FILES[module].read_text())


def imported(
    tree: ast.AST, module: str, is_package: bool, modules: Collection[str] = FILES.keys()
) -> dict[str, bool]:
    """The modules of ours that a file imports, anywhere in it; true for those imported for types alone.

    modules  the names that are modules: `from a import b` imports the module `a.b` where there is one
    """
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                above = here[: len(here) - node.level + is_package]
                base = ".".join([*above, *filter(None, [node.module])])
            whole = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in modules else base for name in whole]
        for name in names:
            if name.split(".")[0] == "fivefold":
                found[name] = found.get(name, True) and id(node) in for_types
    return found


@cache
def imports() -> dict[str, set[str]]:
    """By module: the modules of ours that it imports when it runs, those that functions import included."""
    return {
        module: {
            name
            for name, only_types in imported(tree(module), module, is_package(path)).items()
            if not only_types
        }
        for module, path in FILES.items()
    }


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"
