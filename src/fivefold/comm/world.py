"""Who this process is among the ranks, and how the ranks find each other.

Ranks are started in one of three ways: by fivefold itself (`own`), by torchrun, or by srun. A lone
process (`single`) has no process group at all: nothing in it communicates.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from fivefold.comm.rendezvous import meet
from fivefold.problems import BadInput, Problem
from fivefold.threads import cores

DeviceKind = Literal["cuda", "cpu"]
RANKS_A_CORE = 16
"""More ranks than cores train as well as one on each, but above this number they only wait for each other."""
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This rank's place: `rank` of `size` in all, `local_rank` on this machine, computing on `device`."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    launched: Literal["single", "own", "torchrun", "slurm"]


def device_kind() -> DeviceKind:
    """What this machine computes on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def too_many(ranks: int, key: str) -> list[Problem]:
    """Why a CPU should not be shared by this number of ranks; empty when it may."""
    most = RANKS_A_CORE * cores()
    if ranks <= most:
        return []
    hint = f"Allowed here: at most {most}. Start more machines with torchrun or srun."
    return [Problem(key, f"{ranks} ranks, but this machine has {cores()} cores", hint)]


def device_of(local_rank: int, kind: DeviceKind) -> torch.device:
    """One GPU for each rank of a machine; CPU ranks share theirs."""
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


def single_world(kind: DeviceKind) -> World:
    """The world of a lone process."""
    return World(0, 1, 0, device_of(0, kind), "single")


def launched_world(environ: Mapping[str, str] = os.environ) -> World | None:
    """The world that torchrun or srun put this process into; None when neither did."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names, launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), "torchrun"
    elif _in_srun(environ):
        names, launched = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), "slurm"
    else:
        return None
    rank, size, local_rank = (_number(environ, name) for name in names)
    if launched == "torchrun":
        return World(rank, size, local_rank, device_of(local_rank, device_kind()), "torchrun")
    return World(rank, size, local_rank, device_of(local_rank, device_kind()), "slurm")


@contextmanager
def joined(
    world: World,
    store_path: str | None = None,
    timeout: timedelta = TIMEOUT,
    environ: Mapping[str, str] = os.environ,
    join_s: float = 600.0,
) -> Iterator[None]:
    """Be a member of the process group of `world` inside the block: NCCL on GPUs, Gloo on CPUs.

    store_path  the file through which ranks that fivefold started find each other; not used by others
    timeout     how long a rank waits for the others in every collective
    join_s      how long ranks that another launcher started wait for each other before; then `BadNews`
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.size == 1:
        yield
        return
    on_gpu = world.device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=_store(world, store_path, join_s, environ),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=world.device if on_gpu else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _store(world: World, path: str | None, join_s: float, environ: Mapping[str, str]) -> Store:
    """Where the ranks leave their addresses for each other."""
    if world.launched == "own":
        if path is None:
            raise ValueError("ranks that fivefold starts need a file to meet in")
        return FileStore(path, world.size)
    # torchrun's agent usually serves the store itself; rank 0 does so where it does not, and under srun.
    of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # The agent's store outlives a restart and still holds the addresses of the ranks that died. Rank 0's does
    # not; and the agents of several hosts, one of which came back, need not have counted the same restarts.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_agent else "0"
    serving = world.rank == 0 and not of_agent
    return meet(world.rank, world.size, _master(world, environ), f"attempt-{attempt}", serving, join_s)


def launch_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """By which name the launcher knows this job, restarts included; None where it has none."""
    torchrun, slurm = environ.get("TORCHELASTIC_RUN_ID", "none"), environ.get("SLURM_JOB_ID")
    if torchrun != "none":
        return f"torchrun {torchrun}"
    return f"slurm {slurm}" if slurm and "TORCHELASTIC_RUN_ID" not in environ else None


def restarted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher has started this job before: ranks failed, or it was put into the queue again."""
    return any(
        environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def launch_warning(environ: Mapping[str, str] = os.environ) -> str | None:
    """What will keep the launcher from taking a host back; None where nothing will."""
    several = (
        environ.get("GROUP_WORLD_SIZE", "1") != "1" and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    )
    if not several or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return (
        "torchrun: a host that was lost and comes back will not be taken in: "
        "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every host (docs/hosts.md)."
    )


def _master(world: World, environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port of the store under torchrun or srun."""
    if world.launched == "torchrun":
        return _text(environ, "MASTER_ADDR"), _number(environ, "MASTER_PORT")
    host = environ.get("MASTER_ADDR") or first_host(_text(environ, "SLURM_JOB_NODELIST"))
    if "MASTER_PORT" in environ:
        return host, _number(environ, "MASTER_PORT")
    # Below the range from which the system hands out ports; jobs that share a machine differ in their ids.
    return host, 10_000 + _number(environ, "SLURM_JOB_ID") % 20_000


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: `gpu[003-007,9],login1` -> `gpu003`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else nodelist)


def _in_srun(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several.

    An sbatch script, too, sees a process id and the task count of its allocation, but no step id.
    """
    in_batch_script = environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ
    return "SLURM_PROCID" in environ and environ.get("SLURM_NTASKS", "1") != "1" and not in_batch_script


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise BadInput(
            [Problem(name, "is not set, but the other variables of the launcher are", f"Set {name}.")]
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.isdecimal():
        raise BadInput(
            [Problem(name, f"'{text}' is not a number", "The launcher sets it; do not change it.")]
        )
    return int(text)
