"""Commands as they are typed, run in this process: much quicker than one of their own."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from fivefold.cli import app

SMALL = (
    *("--preset", "tiny", "--model.layers", "2", "--model.dim", "32", "--model.ffn", "32"),
    *("--data.source", "random", "--training.seq_len", "16", "--training.global_batch", "4"),
    *("--run.tensorboard", "false"),
)
"""A job that trains in no time."""


def typed(*words: str) -> Result:
    """What `fivefold WORDS` prints (`stdout`, `stderr`), and its `exit_code`."""
    return CliRunner().invoke(app, words)
