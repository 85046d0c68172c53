"""The examples of docs/python.md run, and print what stands below them, but for the numbers that vary."""

from __future__ import annotations

import re

import pytest

from docs.make_python import PAGE, examples, printed

NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def without_numbers(text: str) -> list[str]:
    """The words of a text, each number replaced: times and the last digits of losses differ by machine."""
    return NUMBER.sub("#", text).split()


@pytest.mark.slow
def test_the_examples_print_what_the_page_shows() -> None:
    shown = examples(PAGE.read_text())
    assert len(shown) >= 6
    for (source, expected), found in zip(shown, printed([source for source, _ in shown]), strict=True):
        assert without_numbers(found) == without_numbers(expected), (
            f"run: python -m docs.make_python\n{source}"
        )


def test_an_example_that_fails_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        printed(["print(1)", "1 / 0"])


def test_no_example_is_without_its_output() -> None:
    assert PAGE.read_text().count("```python\n") == len(examples(PAGE.read_text()))


def test_only_numbers_may_differ() -> None:
    assert without_numbers("loss 1.5e-3, 12 GiB") == without_numbers("loss 7, 1,024 GiB")
    assert without_numbers("tp 2") != without_numbers("pp 2")
