"""How many machines a job gets, with how many ranks each, and what every one of them runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from fivefold.axes.checks import check
from fivefold.config import Job, as_words, resolve
from fivefold.config.resolve import ranks_given
from fivefold.config.run_folder import named_folder, new_folder
from fivefold.problems import BadInput, Problem, refuse

PORT = 29400
"""Where torchrun's agents meet, unless another port is named."""
GRACE_S = 180
"""How long ranks that are asked to stop have to end their step and save."""


@dataclass(frozen=True)
class Launch:
    """One job on `nodes` machines with `ranks` ranks each.

    job      as it was asked for, its run's folder named
    words    what follows `fivefold train` where the job file can be read: FILE --section.key=value ...
    python   the interpreter on the machines
    env      variables that all ranks get
    port     where the machines meet
    grace_s  seconds that ranks have to save when they are asked to stop
    """

    job: Job
    nodes: int
    ranks: int
    words: Sequence[str]
    python: str = "python"
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = PORT
    grace_s: int = GRACE_S

    @property
    def folder(self) -> str:
        """The run's folder, as the machines see it."""
        return str(self.job.run.folder)

    @property
    def name(self) -> str:
        """What the platform calls the job: that of the run's folder, as a label of DNS."""
        plain = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(self.folder).name.lower()).strip("-")
        return (plain if plain[:1].isalpha() else f"run-{plain}")[:50].strip("-")

    @property
    def settings(self) -> list[str]:
        """What follows `fivefold train` where there is no job file: all of the job."""
        return as_words(self.job)

    def torchrun(self, meet: str, run_id: str, *options: str) -> list[str]:
        """The options of torchrun on one of the machines, up to `fivefold train`.

        meet    HOST:PORT
        run_id  the same on all machines, and after a restart: what a lost host has left is then its own
        """
        return [
            *(f"--nnodes={self.nodes}", f"--nproc-per-node={self.ranks}"),
            f"--max-restarts={self.job.resilience.restarts}",
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={meet}", f"--rdzv-id={run_id}"),
            *(*options, "-m", "fivefold", "train"),
        ]

    @property
    def torchrun_env(self) -> dict[str, str]:
        """What torchrun is told by variables, beside those of the user."""
        return {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a host that comes back is not taken in
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.grace_s),
            **self.env,
        }


def with_folder(job: Job, run: str | None) -> tuple[Job, list[str]]:
    """The job with its run's folder named, and the words that say so where the job does not.

    Ranks that are started again must find it.
    """
    folder = str(named_folder(job, run) or new_folder(job))
    if job.run.folder == folder:
        return job, []
    named = job.run.model_copy(update={"folder": folder})
    return job.model_copy(update={"run": named}), [f"--run.folder={folder}"]


def spread(job: Job, nodes: int | None, ranks: int | None) -> tuple[int, int]:
    """Machines, and ranks on each; what is left out follows from the layout. Raises `BadInput`."""
    given = {"--nodes": nodes, "--nproc-per-node": ranks}
    refuse(
        Problem(option, f"{number} is out of range", "Allowed: an integer, at least 1.")
        for option, number in given.items()
        if number is not None and number < 1
    )
    if nodes is not None and ranks is not None:
        return nodes, ranks
    known, total = nodes or ranks, ranks_given(job.layout)
    missing = "--nodes" if nodes is None else "--nproc-per-node"
    if known is None:
        raise BadInput([Problem(missing, "is not given", "Say how many machines.")])
    if total is None or total % known:
        said = "says nothing of ranks" if total is None else f"makes {total} ranks: no multiple of {known}"
        raise BadInput([Problem(missing, f"is not given, and the job's layout {said}", "Give a number.")])
    return (known, total // known) if nodes is not None else (total // known, known)


def check_fits(job: Job, nodes: int, ranks: int, device: Literal["cuda", "cpu"]) -> None:
    """Refuse a job that does not go with so many ranks. Under `layout.auto` the planner decides later."""
    if job.layout.auto:
        return
    try:
        refuse(check(resolve(job, nodes * ranks, device)))
    except BadInput as error:
        here = f"{nodes} machines x {ranks} ranks"
        raise BadInput(
            Problem(
                problem.key,
                f"{problem.message} ({here})",
                problem.hint.replace("--nproc ", "machines x --nproc-per-node = "),
            )
            for problem in error.problems
        ) from None


def read_env(words: Sequence[str]) -> dict[str, str]:
    """Variables from `NAME=VALUE` words. Raises `BadInput`."""
    read = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name) or not value.isprintable():
            hint = "Write --env NAME=VALUE, the value on one line."
            raise BadInput([Problem("--env", f"'{word}' is not a variable", hint)])
        read[name] = value
    return read
