"""YAML that we write means what it was written from."""

from __future__ import annotations

import pytest
import yaml  # type: ignore[import-untyped]

from fivefold.launching.yaml import yaml_text


@pytest.mark.parametrize(
    "value",
    [
        {
            "a": 1,
            "b": True,
            "c": "true",
            "d": "1",
            "e": "1e5",
            "f": "",
            "g": "a: b",
            "h": "# no",
            "i": "it's",
        },
        {"list": [1, "two", {"x": 1, "y": [{"z": "deep"}, {"w": 2}]}], "empty": [], "none": {}},
        {"text": "first\n  second\n\nthird\n", "last": "x"},
        {
            "words": [
                "--a=b",
                "-m",
                "$(NAME):$(PORT)",
                "a:b",
                "a:",
                "1.5",
                "12:30",
                ".5",
                "no",
                "~",
                "null",
                "é",
            ]
        },
        {"nvidia.com/gpu": 8, "/shared": "name", "H100:8": "docker:image:1", "0": "key"},
        {
            "quoted": '"',
            "slash": "\\",
            "tab": "a\tb",
            "colon": "http://x",
            "bang": "!x",
            "at": "@x",
            "star": "*x",
        },
    ],
)
def test_it_is_read_back_as_it_was(value):
    assert yaml.safe_load(yaml_text(value)) == value
