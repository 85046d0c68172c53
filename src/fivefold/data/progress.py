"""A progress bar on standard error when that is a terminal; nothing otherwise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(label: str, total_bytes: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number of bytes just done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not (show and console.is_terminal)
    ) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda done: bar.advance(task, done)
