"""The safetensors files of a folder: what they hold, or why they cannot be used. Nothing in them runs."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.problems import Problem
from fivefold.storage.safetensors import Stored, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
LARGEST_INDEX = 100_000_000
PICKLES = "*.bin"


@dataclass(frozen=True)
class Files:
    """Tensors by name, with the file that each is in; and what is wrong with the folder."""

    tensors: dict[str, tuple[Path, Stored]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def open_files(folder: Path) -> Files:
    """The tensors of a folder: of `model.safetensors`, else of the files that an index names."""
    try:
        if not folder.is_dir():
            hint = "Give the folder of a model: config.json and safetensors files."
            return Files(problems=[Problem(str(folder), "is not a folder", hint)])
        if (folder / SINGLE).exists():
            named = {SINGLE: None}
        elif (folder / INDEX).exists():
            return _indexed(folder)
        else:
            return Files(problems=[_nothing(folder)])
    except OSError as error:
        return Files(problems=[_unreadable(folder, error)])
    return _opened(folder, dict(named))


def _nothing(folder: Path) -> Problem:
    pickles = sorted(path.name for path in folder.glob(PICKLES))
    if pickles:
        hint = "Save it anew from transformers (save_pretrained), which writes safetensors."
        message = f"holds weights as pickles only ({pickles[0]}), and reading a pickle can run code"
        return Problem(str(folder), message, hint)
    return Problem(str(folder), f"holds neither {SINGLE} nor {INDEX}", "Download the weights too.")


def _unreadable(path: Path, error: OSError) -> Problem:
    return Problem(str(error.filename or path), f"cannot be read: {error.strerror}")


def _indexed(folder: Path) -> Files:
    """The files that an index names: in this folder and nowhere else, and holding what it says they hold."""
    path = folder / INDEX
    try:
        if path.stat().st_size > LARGEST_INDEX:
            raise ValueError(f"it has more than {LARGEST_INDEX:,} bytes")
        index: Any = json.loads(path.read_bytes())
        places = index["weight_map"]
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError("its weight_map is not a table of file names")
    except OSError as error:
        return Files(problems=[_unreadable(path, error)])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = "it has no weight_map" if isinstance(error, KeyError | TypeError) else str(error)
        return Files(problems=[Problem(str(path), f"is not an index of tensors: {what}")])
    problems, named = list[Problem](), dict[str, set[str] | None]()
    for tensor, name in places.items():
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            problems.append(
                Problem(str(path), f"'{tensor}' is said to be in '{name}', outside of the folder")
            )
        else:
            group = named.setdefault(name, set())
            assert group is not None
            group.add(tensor)
    found = _opened(folder, named)
    return Files(found.tensors, problems + found.problems)


def _opened(folder: Path, named: dict[str, set[str] | None]) -> Files:
    """The tensors of these files; where an index says which those are, it must be these."""
    found = Files()
    for name, expected in sorted(named.items()):
        path = folder / name
        try:
            header = read_header(path)
        except OSError as error:
            found.problems.append(_unreadable(path, error))
            continue
        except ValueError as error:
            found.problems.append(Problem(str(path), f"cannot be used: {error}", "Download it again."))
            continue
        for tensor in sorted((expected or set()) - header.keys()):
            found.problems.append(Problem(str(path), f"does not hold '{tensor}', which {INDEX} says it does"))
        if expected is not None:
            for tensor in sorted(header.keys() - expected):
                found.problems.append(Problem(str(path), f"holds '{tensor}', which {INDEX} does not name"))
        for tensor, stored in header.items():
            found.tensors[tensor] = (path, stored)
    return found
