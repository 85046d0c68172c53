"""`model.module`: the words by which every rank, and a later run, finds a user's model.

own_model.py:OwnModel         a file, and what it defines
package.module:OwnModel       anything that can be imported
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fivefold.problems import BadInput, Problem, closest, did_you_mean

KEY = "model.module"

_half_read: set[str] = set()
"""Files that are being imported right now: one that starts a training meanwhile would do so forever."""


def reference_of(model: Callable[[], Any]) -> str:
    """The reference of a class or a function. Raises `BadInput` for what cannot be found by its name.

    Inside a package it is the module's name. Elsewhere, a script included, it is the file: that is found
    from any folder.
    """
    name = getattr(model, "__qualname__", None)
    place = getattr(model, "__module__", None)
    if not callable(model) or name is None or place is None:
        what = f"an object of {type(model).__name__}" if name is None else repr(model)
        raise _bad(f"{what} is not a class", "Give the class itself, or a function that returns the model.")
    if "<" in name:
        hint = "Ranks look it up by its name: define it at the top of a file."
        raise _bad(f"'{name}' is defined inside a function", hint)
    defined = sys.modules[place]
    spec = getattr(defined, "__spec__", None)
    place = spec.name if spec is not None else place
    if "." in place:
        return f"{place}:{name}"
    file = getattr(defined, "__file__", None)
    if file is None:
        hint = "Ranks are other processes and import it: write it to a file."
        raise _bad(f"'{name}' was not read from a file", hint)
    return f"{Path(file).resolve()}:{name}"


def absolute(reference: str) -> str:
    """The same reference, valid in any folder."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if _is_file(place) else reference


def found(reference: str) -> Callable[[], Any]:
    """What a reference names: something that makes a model when it is called. Raises `BadInput`."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise _bad(f"'{reference}' names no class", 'Write "file.py:Name" or "package.module:Name".')
    module = _from_file(Path(place)) if _is_file(place) else _imported(place)
    thing: Any = module
    for part in name.split("."):
        if not hasattr(thing, part):
            defined = [key for key, value in vars(thing).items() if _defined_here(value, module)]
            hint = did_you_mean(part, defined) if defined else "It defines no class and no function."
            raise _bad(f"'{reference}': there is no '{part}' in {place}", hint)
        thing = getattr(thing, part)
    if not callable(thing):
        hint = "Name a class, or a function that returns the model."
        raise _bad(f"'{reference}' is {type(thing).__name__}, not a class", hint)
    made: Callable[[], Any] = thing
    return made


def place_of(error: BaseException) -> str:
    """Where an error was raised: `own_model.py:12`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _from_file(path: Path) -> ModuleType:
    """The module that a file defines; read once in each process."""
    file = path.resolve()
    if not file.is_file():
        near = closest(path.name, [other.name for other in file.parent.glob("*.py")])
        hint = f"Did you mean '{path.with_name(near)}'?" if near else "Paths start in the current folder."
        raise _bad(f"there is no file '{path}'", hint)
    name = f"fivefold_own_{file.stem}_{abs(hash(str(file)))}"
    if str(file) in _half_read:
        hint = 'Put what it does under: if __name__ == "__main__":'
        raise _bad(f"'{path}' starts a run while it is imported", hint)
    if name in sys.modules:
        return sys.modules[name]
    _look_in(file.parent)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise _bad(f"'{path}' is not a Python file", "Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _half_read.add(str(file))
    try:
        spec.loader.exec_module(module)
    except BadInput:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise _failed(str(path), error) from error
    finally:
        _half_read.discard(str(file))
    return module


def _imported(place: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise _failed(place, error) from error
        file = f"{place}.py"
        hint = f"Did you mean the file '{file}'?" if Path(file).is_file() else "Is it installed here?"
        raise _bad(f"there is no module '{error.name}'", hint) from None
    except Exception as error:
        raise _failed(place, error) from error


def _look_in(folder: Path) -> None:
    """Let what stands beside a model be imported, after everything else."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _defined_here(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _failed(place: str, error: Exception) -> BadInput:
    return _bad(f"'{place}' cannot be imported: {type(error).__name__}: {error} ({place_of(error)})")


def _bad(message: str, hint: str = "") -> BadInput:
    return BadInput([Problem(KEY, message, hint)])
