"""Several commands at once: what they print, and how all of them end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fivefold.launching.together import Failure, run_together


def sh(text: str) -> list[str]:
    return ["sh", "-c", text]


def never(lines: object) -> bool:
    return False


UNTIL_TOLD = "read -r nothing; echo saved"
"""A command that ends when its stdin does."""


def test_lines_come_under_the_names_of_their_commands(capsys):
    assert run_together({"a": sh("echo one"), "long": sh("echo two >&2")}, 5, never) is None
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a    | one\n", "long | two\n")


def test_one_that_fails_is_named_and_the_others_are_stopped(capsys):
    failed = run_together({"a": sh(UNTIL_TOLD), "b": sh("exit 3"), "c": sh(UNTIL_TOLD)}, 5, never)
    assert failed == Failure("b", 3)
    assert sorted(capsys.readouterr().out.splitlines()) == ["a | saved", "c | saved"]


def test_the_cause_is_named_even_if_its_echo_ends_first():
    commands = {"a": sh("echo lost a peer; exit 1"), "b": sh("sleep 0.3; exit 4"), "c": sh(UNTIL_TOLD)}
    assert run_together(commands, 5, lambda lines: "lost a peer" in lines) == Failure("b", 4)


def test_one_that_ends_well_beside_an_echo_is_not_the_cause():
    commands = {"a": sh("echo lost a peer; exit 1"), "b": sh("sleep 0.3")}
    assert run_together(commands, 5, lambda lines: "lost a peer" in lines) == Failure("a", 1)


def test_one_that_does_not_stop_is_killed(monkeypatch, capsys):
    monkeypatch.setattr("fivefold.launching.together.MARGIN_S", 0.1)
    failed = run_together(
        {"stubborn": sh("echo $$; exec sleep 1000"), "b": sh("sleep 0.2; exit 1")}, 0.1, never
    )
    assert failed == Failure("b", 1)
    printed = capsys.readouterr()
    assert "killed: stubborn" in printed.err
    process = int(printed.out.split()[-1])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_all(tmp_path, number, code):
    program = (
        "import typer\n"
        "from fivefold.commands.common import reporting\n"
        "from fivefold.launching.together import run_together\n"
        f"said = ['sh', '-c', {'touch here.$$; ' + UNTIL_TOLD!r}]\n"
        "try:\n"
        "    with reporting(False):\n"
        "        run_together({'a': said, 'b': said}, 5, lambda lines: False)\n"
        "except typer.Exit as exit:\n"
        "    raise SystemExit(exit.exit_code)\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while len(list(tmp_path.glob("here.*"))) < 2:  # else the second may not have been started yet
        assert caller.poll() is None
        time.sleep(0.02)
    time.sleep(0.1)
    caller.send_signal(number)
    out, said = caller.communicate(timeout=30)
    assert sorted(out.splitlines()) == ["a | saved", "b | saved"]
    assert "stopping a, b: ranks have 5 s to save" in said
    assert "Traceback" not in said
    assert "nothing to save" not in said
    assert caller.returncode == code
