"""Pictures by matplotlib, which is imported only when something is drawn."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fivefold.problems import BadInput, Problem, unwritable

ENDINGS = (".png", ".svg", ".pdf")
"""Of files that a picture can be written to; the ending says in which format."""
_FORMAT = "Name a file that ends in .png, .svg or .pdf."


def undrawable(path: str | None) -> list[Problem]:
    """Why `--png` cannot be that file; found before the work that it is to show."""
    if path is None:
        return []
    if find_spec("matplotlib") is None:
        return [_missing()]
    if Path(path).suffix.lower() not in ENDINGS:
        return [Problem("--png", f"'{path}' has no ending that says in which format", _FORMAT)]
    return unwritable(path, "--png")


def _missing() -> Problem:
    return Problem("--png", "needs matplotlib, which is not here", "Install it: pip install matplotlib")


def pyplot() -> Any:
    """Matplotlib's, drawing into files. Raises `BadInput` where it is not installed."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ImportError:
        raise BadInput([_missing()]) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str) -> None:
    """Write a figure to a file, whose ending says in which format, and let go of it. Raises `BadInput`."""
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise BadInput([Problem("--png", f"cannot write {path}: {error}", _FORMAT)]) from None
    finally:
        pyplot().close(figure)
