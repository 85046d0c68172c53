"""Several hosts on one Linux machine: network namespaces on a switch, each with a name and an address.

    python -m benchmarks.hosts --hosts 2 -- hostname
    python -m benchmarks.hosts --hosts 2 --nproc 2 -- -m fivefold train --preset tiny --run.folder runs/two
    python -m benchmarks.hosts --hosts 2 --nproc 2 --rate 100mbit -- -m fivefold train --preset tiny
    python -m benchmarks.hosts --show-loss-of-a-host
    python -m benchmarks.slow_links

The command runs on every host; with --nproc torchrun runs it, with so many ranks a host. Hosts share this
machine's files, cores and memory; what is sent between them goes through the switch. Needs Linux, root
(CAP_NET_ADMIN, CAP_SYS_ADMIN) and the commands `ip` and `unshare`; --rate and --delay need `tc` and a kernel
with tbf and netem.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.links import bytes_per_second, received
from fivefold.problems import BadInput

NETWORK = "10.55.0"
PORT = 29400
LINK = "eth0"
PREFIX = "fivefold-"
NAMES = Path("/etc/netns")
"""`ip netns exec` shows a host the files of the folder of its name there as those of /etc."""
BURST_S, BURST_LEAST = 0.005, 68_000
"""What a slow link lets through at once after a rest: seconds' worth, but the kernel's largest packet."""
QUEUE = "100ms"
"""Packets that would wait longer are dropped."""


class NoHostsError(Exception):
    """Why there can be no hosts on this machine."""


@dataclass
class Host:
    """One of the hosts: `name` is its host name, which the others know."""

    name: str
    address: str
    namespace: str
    switch: str
    observer: int
    """A process in the switch's namespace, by which its counters are read."""
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host; `options` are those of `subprocess.Popen`."""
        named = f'echo {self.name} > /proc/sys/kernel/hostname && exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", named, "sh"]
        process = subprocess.Popen([*inside, *command], start_new_session=True, **options)
        self.started.append(process)
        return process

    def sent(self) -> int:
        """Bytes that have come out of the host's link, headers of packets included."""
        return received(self.name, Path(f"/proc/{self.observer}/net/dev"))

    def kill(self) -> None:
        """Lose the host: all its processes are killed, and its link goes down."""
        self.kill_processes()
        self.cut()

    def cut(self) -> None:
        """Take the link down. Processes live on, and nobody is told: what is sent is lost without a word."""
        _ip("-n", self.switch, "link", "set", self.name, "down")

    def bring_back(self) -> None:
        """Bring the link up again. What ran on the host does not come back by itself."""
        _ip("-n", self.switch, "link", "set", self.name, "up")

    def kill_processes(self) -> None:
        """Kill every process of the host, whatever started it and whichever group it is in."""
        for process in self.started:  # it may not have come to its host yet
            process.kill()
            process.wait()
        self.started.clear()
        _kill_all(self.namespace)


@contextmanager
def hosts(count: int, rate: str | None = None, delay: str | None = None) -> Iterator[list[Host]]:
    """Hosts `host0`, `host1`, ... inside the block; behind it nothing of them is left. Raises `NoHostsError`.

    rate   of each host's link in each direction: 100mbit. Raises `BadInput`
    delay  of each packet that a host sends: 5ms
    """
    base = f"{PREFIX}{os.getpid()}"
    switch = f"{base}-switch"
    if rate is not None:
        bytes_per_second(rate)
    made: list[Host] = []
    _clear_up()
    try:
        _add_namespace(switch)
        with _process_in(switch) as observer:
            made += [
                Host(f"host{i}", f"{NETWORK}.{i + 1}", f"{base}-host{i}", switch, observer)
                for i in range(count)
            ]
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            names = "".join(f"{host.address} {host.name}\n" for host in made)
            for host in made:
                _add_namespace(host.namespace)
                _connect(host, rate, delay)
                (NAMES / host.namespace).mkdir(parents=True)
                (NAMES / host.namespace / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
                (NAMES / host.namespace / "resolv.conf").write_text("")  # else unknown names are waited for
            yield made
    finally:
        for host in made:
            for process in host.started:  # it may not have come to its host yet
                process.kill()
                process.wait()
        for namespace in _namespaces():
            if namespace.startswith(f"{base}-"):
                _remove(namespace)


def torchrun(host: Host, meet: Host, nnodes: str, nproc: int, *options: str) -> list[str]:
    """The beginning of a command that starts `nproc` ranks of a job on a host; hosts meet at `meet`."""
    at = [f"--nnodes={nnodes}", f"--nproc-per-node={nproc}", f"--local-addr={host.address}"]
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={meet.address}:{PORT}", "--rdzv-id=hosts"]
    return [sys.executable, "-m", "torch.distributed.run", *at, *where, *options]


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What torchrun on several hosts needs to be told, beside what it is told here anyway.

    By default the first agent's store serves all restarts of torchrun, and a host that comes back never
    learns where it is: so each restart gets a store of its own.
    """
    return {**environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": LINK}


def _connect(host: Host, rate: str | None, delay: str | None) -> None:
    """A cable from the host to the switch."""
    _ip("-n", host.switch, "link", "add", host.name, "type", "veth", "peer", LINK, "netns", host.namespace)
    _ip("-n", host.switch, "link", "set", host.name, "master", "bridge", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", LINK)
    for link in ("lo", LINK):
        _ip("-n", host.namespace, "link", "set", link, "up")
    for namespace, link in ((host.namespace, LINK), (host.switch, host.name)) if rate or delay else ():
        _slow_down(namespace, link, rate, delay if link == LINK else None)


def _slow_down(namespace: str, link: str, rate: str | None, delay: str | None) -> None:
    tc = ["tc", "-n", namespace, "qdisc", "add", "dev", link]
    if delay:
        _run(*tc, "root", "handle", "1:", "netem", "delay", delay)
    if rate:
        place = ["parent", "1:1"] if delay else ["root"]
        burst = max(BURST_LEAST, int(bytes_per_second(rate) * BURST_S))
        _run(*tc, *place, "tbf", "rate", rate, "burst", str(burst), "latency", QUEUE)


@contextmanager
def _process_in(namespace: str) -> Iterator[int]:
    """A process that does nothing but be in a namespace: its number."""
    words = ["ip", "netns", "exec", namespace, "sh", "-c", "echo here; exec sleep infinity"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise NoHostsError(f"no process can be started in the namespace {namespace}")
            yield process.pid
        finally:
            process.kill()


def _add_namespace(name: str) -> None:
    _ip("netns", "add", name)


def _namespaces() -> list[str]:
    try:
        return [line.split()[0] for line in _ip("netns", "list").splitlines() if line]
    except NoHostsError:
        return []


def _clear_up() -> None:
    """Remove hosts whose maker was killed."""
    for namespace in _namespaces():
        maker = namespace.removeprefix(PREFIX).partition("-")[0]
        if namespace.startswith(PREFIX) and maker.isdecimal() and not Path(f"/proc/{maker}").exists():
            _remove(namespace)


def _remove(namespace: str) -> None:
    _kill_all(namespace)
    _ip("netns", "delete", namespace)
    shutil.rmtree(NAMES / namespace, ignore_errors=True)


def _kill_all(namespace: str) -> None:
    while pids := _ip("netns", "pids", namespace).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        raise NoHostsError(f"{words[0]}: {error.strerror}") from None
    if done.returncode != 0:
        raise NoHostsError(f"`{' '.join(words)}`: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many; default: %(default)s")
    parser.add_argument("--nproc", type=int, help="ranks a host, started by torchrun")
    parser.add_argument("--rate", help="of each link in each direction: 100mbit")
    parser.add_argument("--delay", help="of each packet that a host sends: 5ms")
    parser.add_argument("--show-loss-of-a-host", action="store_true", help="see benchmarks/host_loss.py")
    parser.add_argument("command", nargs="*", help="what runs on every host, after --")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if given.show_loss_of_a_host:
        from benchmarks.host_loss import show

        return show()
    if not given.command:
        parser.error("no command; write it behind --")
    try:
        with hosts(given.hosts, given.rate, given.delay) as made:
            started = []
            for host in made:
                begin = torchrun(host, made[0], str(given.hosts), given.nproc) if given.nproc else []
                started.append(host.start([*begin, *given.command], env=environment()))
            return max(process.wait() for process in started)
    except NoHostsError as error:
        print(f"no hosts can be made here: {error}", file=sys.stderr)
        return 1
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
