"""Commands that answer at once."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.commands.typed import typed


def test_help_imports_nothing_heavy():
    """One process asks for every page, and says after which of them something heavy is there."""
    script = """
import sys
from fivefold.cli import app
for words in sys.argv[1:]:
    app(words.split(), standalone_mode=False)
    heavy = {"torch", "numpy", "pyarrow", "transformers", "tokenizers"} & set(sys.modules)
    assert not heavy, (words, heavy)
"""
    verbs = ("train", "plan", "simulate", "probe", "scaling", "backtest")
    pages = ["--help", *(f"{verb} --help" for verb in verbs), "models", "keys"]
    done = subprocess.run([sys.executable, "-c", script, *pages], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_names_the_verbs_and_shows_examples():
    page = typed("--help")
    assert page.exit_code == 0
    assert all(f"  {verb} " in page.stdout for verb in ("plan", "train", "verify", "models", "keys"))
    assert "fivefold train --preset tiny --nproc 4" in typed("train", "--help").stdout


def test_version():
    assert typed("--version").stdout == "0.1.0\n"


def test_models_have_exact_counts():
    listed = json.loads(typed("models", "--json").stdout)
    assert listed["gpt2"]["parameters"] == 124_439_808
    assert "405,853,388,800" in typed("models").stdout


def test_keys_are_listed_with_what_they_allow():
    listed = json.loads(typed("keys", "--json").stdout)
    assert listed["training.steps"]["default"] == 200
    assert listed["layout.zero"]["allowed"] == "an integer, at least 0 and at most 3"
    assert "model.layers" in listed
    one = typed("keys", "optimizer").stdout
    assert "optimizer.betas" in one
    assert "training.steps" not in one
