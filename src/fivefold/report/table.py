"""Tables and lists of figures as plain text."""

from collections.abc import Mapping, Sequence


def as_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first, which names the row, to the left, the others right."""
    lines = [header, *rows]
    first, *others = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(first), *map(str.rjust, numbers, others)]) for name, *numbers in lines
    )


def as_lines(figures: Mapping[str, str], width: int = 18) -> str:
    """A line for each figure: its name, then what is said of it."""
    return "\n".join(f"{name:{width}}{text}" for name, text in figures.items())
