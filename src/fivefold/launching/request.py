"""What `fivefold launch` was asked for: one job, one platform, and the options that are of use to it."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.config import Job, sort_words
from fivefold.launching import files, ssh
from fivefold.launching.gpus import Gpus, read_gpus
from fivefold.launching.kubernetes import Kind, manifest
from fivefold.launching.machines import GRACE_S, PORT, Launch, check_fits, read_env, spread, with_folder
from fivefold.launching.skypilot import task
from fivefold.launching.slurm import read_directives, script
from fivefold.launching.storage import on_storage, read_storage
from fivefold.problems import BadInput, Problem, refuse

PLATFORMS = ("hosts", "slurm", "kubernetes", "skypilot")
FILES = PLATFORMS[1:]
TAKEN_BY = {
    "nodes": FILES,
    "gpus": FILES,
    "folder": ("hosts", "slurm", "skypilot"),
    "port": ("hosts", "kubernetes", "skypilot"),
    "ssh": ("hosts",),
    "master": ("hosts",),
    "dry_run": ("hosts",),
    "restarts": FILES,
    "setup": ("slurm", "skypilot"),
    "sbatch": ("slurm",),
    "kind": ("kubernetes",),
    "image": ("kubernetes",),
    "storage": ("kubernetes", "skypilot"),
    "force": FILES,
}
"""What some platforms have no use for: refused there, never ignored."""
RANGES = {"port": (1, 65535), "grace": (1, 86400), "restarts": (0, 1000)}
RESTARTS = 20


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Request:
    """A job and the options of the command line, each None or empty where it was left out.

    words  the job file and the settings, as they were given
    """

    job: Job
    words: Sequence[str] = ()
    preset: str | None = None
    run: str | None = None
    hosts: str | None = None
    slurm: str | None = None
    kubernetes: str | None = None
    skypilot: str | None = None
    nodes: int | None = None
    nproc_per_node: int | None = None
    gpus: str | None = None
    folder: str | None = None
    python: str | None = None
    env: Sequence[str] = ()
    port: int | None = None
    grace: int | None = None
    ssh: str | None = None
    master: str | None = None
    dry_run: bool = False
    restarts: int | None = None
    setup: str | None = None
    sbatch: Sequence[str] = ()
    kind: Kind | None = None
    image: str | None = None
    storage: str | None = None
    force: bool = False

    def carry_out(self) -> str | None:
        """Start the job, or write its file; the command that comes next, if any.

        Raises `BadInput` before anything is started or written, and `BadNews` where a host fails.
        """
        platform = self._platform()
        if platform == "hosts":
            self._over_ssh()
            return None
        path = str(getattr(self, platform))
        refuse(files.check_writable(path, option(platform), self.force))
        nodes, ranks = spread(self.job, self.nodes, self.nproc_per_node)
        gpus = read_gpus(self.gpus, ranks)
        check_fits(self.job, nodes, ranks, "cuda" if gpus.count else "cpu")
        launch = self._launch(nodes, ranks, self.python or "python")
        writers = {"slurm": self._slurm, "kubernetes": self._kubernetes, "skypilot": self._skypilot}
        text, command = writers[platform](launch, gpus)
        files.write(path, text, option(platform))
        return None if path == files.STDOUT else f"{command} {shlex.quote(path)}"

    def _platform(self) -> str:
        """The one platform. Raises `BadInput` where it is none or several, or has no use for an option."""
        asked = [name for name in PLATFORMS if getattr(self, name) is not None]
        if len(asked) != 1:
            said = f"given together with {option(asked[0])}" if asked else "no platform is named"
            hint = f"Give one of {', '.join(map(option, PLATFORMS))}."
            raise BadInput([Problem(option(asked[1] if asked else PLATFORMS[0]), said, hint)])
        problems = [
            Problem(
                option(name),
                f"is of no use to {option(asked[0])}",
                f"It is for {' and '.join(map(option, users))}.",
            )
            for name, users in TAKEN_BY.items()
            if getattr(self, name) not in (None, False, (), []) and asked[0] not in users
        ]
        for name, (least, most) in RANGES.items():
            number = getattr(self, name)
            if number is not None and not least <= number <= most:
                hint = f"Allowed: an integer, at least {least} and at most {most}."
                problems.append(Problem(option(name), f"{number} is out of range", hint))
        refuse(problems)
        return asked[0]

    def _launch(self, nodes: int, ranks: int, python: str) -> Launch:
        job, named = with_folder(self.job, self.run)
        job_file, settings = sort_words(list(self.words))
        words = [*job_file, *(["--preset", self.preset] if self.preset else [])]
        words += [*(f"--{key}={value}" for key, value in settings), *named]
        return Launch(
            *(job, nodes, ranks, words, python, read_env(self.env)),
            port=PORT if self.port is None else self.port,
            grace_s=GRACE_S if self.grace is None else self.grace,
        )

    def _over_ssh(self) -> None:
        names = ssh.read_hosts(str(self.hosts))
        words = ssh.read_ssh(ssh.SSH if self.ssh is None else self.ssh)
        _, ranks = spread(self.job, len(names), self.nproc_per_node)
        check_fits(self.job, len(names), ranks, "cuda")
        launch = self._launch(len(names), ranks, self.python or sys.executable)
        job_file = next(iter(sort_words(list(self.words))[0]), None)
        hosts = ssh.Hosts(
            names, words, self.folder or os.getcwd(), self.master or ssh.address(names[0]), job_file
        )
        if self.dry_run:
            print("\n".join(map(shlex.join, ssh.commands(launch, hosts).values())))
            return
        ssh.check_hosts(launch, hosts)
        ssh.train_on(launch, hosts)

    def _slurm(self, launch: Launch, gpus: Gpus) -> tuple[str, str]:
        more = read_directives(self.sbatch)
        return script(launch, gpus, self._restarts, self.folder, self.setup, more), "sbatch"

    def _kubernetes(self, launch: Launch, gpus: Gpus) -> tuple[str, str]:
        kind = self.kind or "trainjob"
        problems = []
        if self.image is None:
            hint = (
                "Name a container's image that has fivefold and the job's data, or sees them on the storage."
            )
            problems.append(Problem("--image", "is not given", hint))
        if gpus.kind:
            hint = f"Write --gpus {gpus.count}, and choose machines in the file (nodeSelector)."
            problems.append(
                Problem("--gpus", f"'{gpus}' names a kind, which clusters label each in their way", hint)
            )
        if self.restarts is not None and kind == "trainjob":
            hint = "Its runtime says how often pods are started again. Leave it out, or give --kind jobset."
            problems.append(Problem("--restarts", "a TrainJob does not say it", hint))
        refuse(problems)
        storage = read_storage(self.storage)
        launch = replace(launch, job=on_storage(launch.job, storage))
        text = manifest(kind, launch, gpus.count, str(self.image), storage, self._restarts)
        return text, "kubectl create -f"

    def _skypilot(self, launch: Launch, gpus: Gpus) -> tuple[str, str]:
        if gpus.count and not gpus.kind:
            hint = f"Write --gpus H100:{gpus.count}; `sky show-gpus` lists them. --gpus 0 is for CPUs."
            raise BadInput([Problem("--gpus", "SkyPilot must know which", hint)])
        storage = read_storage(self.storage)
        launch = replace(launch, job=on_storage(launch.job, storage))
        text = task(launch, gpus, storage, self._restarts, self.folder or ".", self.setup)
        return text, "sky jobs launch"

    @property
    def _restarts(self) -> int:
        return RESTARTS if self.restarts is None else self.restarts
