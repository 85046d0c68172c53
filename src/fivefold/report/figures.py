"""Pictures by matplotlib, which is imported only when something is drawn."""

from typing import Any

from fivefold.problems import BadInput, Problem


def pyplot() -> Any:
    """Matplotlib's, drawing into files. Raises `BadInput` where it is not installed."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ImportError:
        hint = "Install it: pip install matplotlib"
        raise BadInput([Problem("--png", "needs matplotlib, which is not here", hint)]) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str) -> None:
    """Write a figure to a file, whose ending says in which format, and let go of it. Raises `BadInput`."""
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        hint = "Name a file that ends in .png, .svg or .pdf."
        raise BadInput([Problem("--png", f"cannot write {path}: {error}", hint)]) from None
    finally:
        pyplot().close(figure)
