"""Hosts that are reached by ssh: whether they can be, and a job's ranks on all of them.

On each host a shell is given one line: change into the folder, then `fivefold.launching.host`, which is
torchrun. The first host is the one where all meet.
"""

import re
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fivefold.launching.host import ENDED_BY, MODULE
from fivefold.launching.machines import Launch
from fivefold.launching.together import Failure, run_together
from fivefold.problems import BadInput, BadNews, Problem
from fivefold.training.failures import LOST_PEER

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
"""Nobody is there to type a password, and a host that says nothing for 45 seconds is lost."""
ANSWER_S = 60.0
"""How long a host has to answer before anything is trained."""
NO_CONNECTION = 255
"""The exit code of ssh itself."""
NO_FOLDER, NO_JOB = 91, 92


@dataclass(frozen=True)
class Hosts:
    """The hosts of a launch, and how they are reached.

    names   as ssh takes them, all different; the first one is where all meet
    ssh     the words before a host's name
    folder  where the command runs, on every host
    master  the address by which the others reach the first host
    job     the job file or run's folder, which every host must see; None where there is none
    """

    names: tuple[str, ...]
    ssh: tuple[str, ...]
    folder: str
    master: str
    job: str | None = None


def read_hosts(text: str) -> tuple[str, ...]:
    """Hosts from `a,user@b,c`. Raises `BadInput`."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise BadInput([Problem("--hosts", f"'{text}' names no host", "Write --hosts a,b,c.")])
    problems, seen = [], set[str]()
    for name in names:
        if not re.fullmatch(r"(\w[\w.-]*@)?[A-Za-z0-9][\w.-]*", name):
            hint = "Write HOST or USER@HOST. Ports and the like belong into ~/.ssh/config or --ssh."
            problems.append(Problem("--hosts", f"'{name}' is not the name of a host", hint))
        elif address(name) in seen:
            hint = "Name each host once; --nproc-per-node says how many ranks it has."
            problems.append(Problem("--hosts", f"{address(name)} is named twice", hint))
        seen.add(address(name))
    if problems:
        raise BadInput(problems)
    return names


def read_ssh(text: str) -> tuple[str, ...]:
    """The words of the ssh command. Raises `BadInput` where there is no such program."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise BadInput([Problem("--ssh", f"'{text}' cannot be split into words: {error}")]) from None
    if not words or shutil.which(words[0]) is None:
        message = f"there is no program '{words[0] if words else text}' here"
        raise BadInput([Problem("--ssh", message, "Install OpenSSH's client, or name another program.")])
    return words


def address(host: str) -> str:
    """How the others reach a host: its name without the user's."""
    return host.rpartition("@")[2]


def commands(launch: Launch, hosts: Hosts) -> dict[str, list[str]]:
    """What is run here for each host, by its name."""
    run_id = f"{launch.name}-{secrets.token_hex(4)}"
    meet = f"{hosts.master}:{launch.port}"
    found = {}
    for number, host in enumerate(hosts.names):
        options = (
            f"--local-addr={address(host) if number else hosts.master}",
            f"--rdzv-conf=is_host={'false' if number else 'true'}",
        )
        torchrun = launch.torchrun(meet, run_id, *options)
        words = [launch.python, "-m", MODULE, *torchrun, *launch.words]
        line = f"cd {shlex.quote(hosts.folder)} && exec env {_variables(launch.torchrun_env)} "
        found[host] = [*hosts.ssh, host, line + shlex.join(words)]
    return found


def check_hosts(launch: Launch, hosts: Hosts) -> None:
    """Ask every host whether it can start. Raises `BadNews` with all that cannot."""
    with ThreadPoolExecutor(len(hosts.names)) as pool:
        answers = list(pool.map(lambda host: _answer(host, launch, hosts), hosts.names))
    silent = [
        f"{host}: {text}" for host, (version, text) in zip(hosts.names, answers, strict=True) if not version
    ]
    if silent:
        raise BadNews("\n".join([*silent, "Nothing was started."]))
    versions = {host: version for host, (version, _) in zip(hosts.names, answers, strict=True)}
    if len(set(versions.values())) > 1:
        told = ", ".join(f"{version} on {host}" for host, version in versions.items())
        raise BadNews(f"the hosts have different versions of fivefold: {told}. Nothing was started.")


def train_on(launch: Launch, hosts: Hosts) -> None:
    """Train on all hosts, which have been checked. Raises `BadNews` that names the host that failed."""
    failed = run_together(commands(launch, hosts), launch.grace_s, _lost_a_peer)
    if failed is not None:
        others = [host for host in hosts.names if host != failed.name]
        stopped = f" {', '.join(others)} had to stop." if others else ""
        raise BadNews(f"{failed.name} failed: {_how(failed)}.{stopped}")


def _answer(host: str, launch: Launch, hosts: Hosts) -> tuple[str, str]:
    """The version of fivefold on a host; or an empty one, and why it cannot start."""
    steps = [f"cd {shlex.quote(hosts.folder)} || exit {NO_FOLDER}"]
    if hosts.job is not None:
        steps.append(f"[ -e {shlex.quote(hosts.job)} ] || exit {NO_JOB}")
    ask = [launch.python, "-c", "import fivefold; print(fivefold.__version__)"]
    steps.append(f"exec env {_variables(launch.torchrun_env)} {shlex.join(ask)}")
    try:
        done = subprocess.run(
            [*hosts.ssh, host, "; ".join(steps)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {ANSWER_S:.0f} s"
    except OSError as error:
        return "", f"{hosts.ssh[0]} cannot be run: {error.strerror}"
    if done.returncode == 0 and done.stdout.strip():
        return done.stdout.split()[-1], ""
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    reasons = {
        NO_CONNECTION: f"cannot be reached: {last}",
        NO_FOLDER: f"there is no folder {hosts.folder} (--folder)",
        NO_JOB: f"there is no {hosts.job} in {hosts.folder}: hosts must share it (--folder)",
    }
    return "", reasons.get(done.returncode, f"{launch.python} cannot import fivefold (--python): {last}")


def _variables(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())


def _lost_a_peer(lines: Sequence[str]) -> bool:
    """Whether a host failed because another one did, by its lines."""
    return any(LOST_PEER in line for line in lines) and not any(ENDED_BY in line for line in lines)


def _how(failed: Failure) -> str:
    if failed.code == NO_CONNECTION:
        return "the connection was lost"
    if failed.code < 0:
        return f"its connection {ENDED_BY} {signal.Signals(-failed.code).name}"
    return f"exit code {failed.code}"
