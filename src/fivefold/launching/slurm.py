"""A script for sbatch: srun starts the ranks, and a job that can go on goes back to the queue.

It saves and goes back before its time is up, and after a failure; not after bad input (exit code 2), which
would be as bad again.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from fivefold.launching.gpus import Gpus
from fivefold.launching.machines import Launch
from fivefold.problems import BadInput, Problem, did_you_mean

DIRECTIVES = frozenset(
    """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
    container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid
    gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold
    ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind
    mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe
    parsable partition power prefer priority profile propagate qos quiet reboot requeue reservation
    oom-kill-step resv-ports segment signal sockets-per-node spread-job stepmgr switches test-only thread-spec
    threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes verbose wait wait-all-nodes
    wckey wrap
    """.split()  # noqa: SIM905
)
"""The long options of sbatch in its manual pages: those of Slurm 22.05, and what came until 24.11."""

BODY = """
out_of_time=
trap 'out_of_time=yes; scancel --signal=USR1 "$SLURM_JOB_ID.0"' USR1

srun --kill-on-bad-exit=1 {command} &
wait $!; code=$?
if [ "$out_of_time" ]; then wait $!; code=$?; fi  # the signal has ended the first wait

failed=
if [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    failed=yes
fi
if [ "$out_of_time" ] || [ "$failed" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def read_directives(words: Sequence[str]) -> dict[str, str]:
    """Options of sbatch from `NAME=VALUE` or `NAME`. Raises `BadInput` where sbatch has no such option."""
    read, problems = {}, []
    for word in words:
        name, _, value = word.lstrip("-").partition("=")
        if name not in DIRECTIVES:
            problems.append(
                Problem("--sbatch", f"sbatch has no option '{name}'", did_you_mean(name, DIRECTIVES))
            )
        elif not re.fullmatch(r"[^\s#'\"\\]*", value):
            hint = "Write --sbatch NAME=VALUE without blanks or quotes."
            problems.append(Problem("--sbatch", f"'{word}' does not go into a line of #SBATCH", hint))
        read[name] = value
    if problems:
        raise BadInput(problems)
    return read


def script(
    launch: Launch,
    gpus: Gpus,
    restarts: int,
    folder: str | None = None,
    setup: str | None = None,
    more: Mapping[str, str] | None = None,
) -> str:
    """The text of the script.

    restarts  how often the job goes back to the queue after failures
    folder    where it runs; None is where it is submitted
    setup     a line of shell that comes first, such as one that activates an environment
    more      options of sbatch by name; they go over ours
    """
    directives = {
        "job-name": launch.name,
        "nodes": str(launch.nodes),
        "ntasks-per-node": str(launch.ranks),
        **({"gpus-per-node": str(gpus)} if gpus.count else {}),
        **({"chdir": folder} if folder is not None else {}),
        **{"requeue": "", "open-mode": "append", "signal": f"B:USR1@{launch.grace_s}"},
        **(more or {}),
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in directives.items()]
    first = [f"export {name}={shlex.quote(value)}" for name, value in launch.env.items()]
    first += [f"{setup} || exit 1"] if setup else []
    command = shlex.join([launch.python, "-m", "fivefold", "train", *launch.words])
    body = BODY.format(command=command, restarts=restarts)
    return "\n".join([*lines, *([""] if first else []), *first]) + "\n" + body
