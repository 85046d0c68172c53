"""The tables of docs/hardware.md are those of the code."""

from __future__ import annotations

from docs.make_hardware import PAGE, with_tables


def test_the_pages_tables_are_up_to_date():
    page = PAGE.read_text()
    assert with_tables(page) == page, "run: python docs/make_hardware.py"
    assert page.count("| B200 | 2,250 |") == 1
