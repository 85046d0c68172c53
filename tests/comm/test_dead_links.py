"""Connections whose other end is silent are ended by the system: here, that it is asked to.

Over a link that is cut: tests/training/test_hosts.py.
"""

import os
import socket
from pathlib import Path

import pytest

from fivefold.comm.dead_links import watch_connections


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux only")
def test_connections_are_watched_and_nothing_else_is_touched():
    open_before = len(os.listdir("/proc/self/fd"))
    before = watch_connections()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as near:
        near.connect(server.getsockname())
        with server.accept()[0] as far:
            assert watch_connections(silent_s=20) == before + 2
            for end in (near, far):
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            assert server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
            near.sendall(b"still works")
            assert far.recv(100) == b"still works"
    assert watch_connections() == before
    assert len(os.listdir("/proc/self/fd")) == open_before
