"""A program that is called as ssh is, HOST COMMAND, and runs the command in a shell on this machine.

Hosts whose name begins with `gone` cannot be reached.
"""

from __future__ import annotations

from pathlib import Path

SCRIPT = """#!/bin/sh
case $1 in
    gone*) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255 ;;
esac
shift
exec sh -c "$*"
"""


def make_ssh(folder: Path, script: str = SCRIPT) -> str:
    """The path of the program."""
    path = folder / "like-ssh"
    path.write_text(script)
    path.chmod(0o755)
    return str(path)
