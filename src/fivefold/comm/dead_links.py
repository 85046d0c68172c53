"""A host that loses its power or its cable says nothing, and its peers wait for it until some timeout.

The system can ask on each connection whether the other end is there. Where a process is busy, or stopped, its
system still answers.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path

SILENT_S = 30
"""After how many seconds without a sign of life a connection counts as lost."""
ASK_S = 5


def watch_connections(silent_s: int = SILENT_S) -> int:
    """Have the system end TCP connections of this process whose other end is silent; how many it watches.

    Only where the system lets us (Linux); elsewhere nothing is watched.
    """
    watched = 0
    descriptors = Path("/proc/self/fd")
    for path in descriptors.iterdir() if descriptors.exists() else ():
        with suppress(OSError):  # closed in the meantime
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    watched += _watch(connection, silent_s)
    return watched


def _watch(connection: socket.socket, silent_s: int) -> bool:
    """Whether this is a TCP connection, and is watched now."""
    if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        connection.getpeername()
    except OSError:  # it only listens
        return False
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", max(1, silent_s - 3 * ASK_S)),
        ("TCP_KEEPINTVL", ASK_S),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", silent_s * 1000),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return True
