"""Who a process is, by what its launcher says, and that such processes find each other."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap

import pytest

from fivefold.comm.world import first_host, launched_world
from fivefold.problems import BadInput

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def test_nobody_launched_this_process():
    assert launched_world({}) is None


def test_torchrun():
    world = launched_world(TORCHRUN)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.launched) == (3, 8, 1, "torchrun")


def test_srun():
    world = launched_world(SRUN)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.launched) == (5, 16, 1, "slurm")


def test_torchrun_inside_an_allocation_is_torchrun():
    world = launched_world(SRUN | TORCHRUN)
    assert world is not None
    assert world.launched == "torchrun"


def test_a_batch_script_or_a_single_task_starts_its_own_ranks():
    script = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"} | {"ENVIRONMENT": "BATCH"}
    assert launched_world(script) is None
    assert launched_world(SRUN | {"SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", ""), ("RANK", "first")])
def test_a_launchers_variable_that_is_wrong_is_named(name, value):
    with pytest.raises(BadInput, match=name):
        launched_world(TORCHRUN | {name: value})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu8", "gpu7"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("gpu[12,14]", "gpu12"),
        ("rack[1-2]node[08-09],x", "rack1node08"),
        ("a-[1-4]-ib", "a-1-ib"),
    ],
)
def test_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_launched_processes_meet(launcher):
    """Two processes with a launcher's variables; the second attempt must not see the first one's addresses."""
    script = """
        import sys
        import torch, torch.distributed as dist
        from fivefold.comm.world import joined, launched_world
        import os

        for attempt in ("0", "1"):
            port = int(sys.argv[1 + int(attempt)])
            environ = dict(os.environ, MASTER_PORT=str(port), TORCHELASTIC_RESTART_COUNT=attempt)
            world = launched_world(environ)
            with joined(world, environ=environ):
                total = torch.tensor([world.rank + 1.0])
                dist.all_reduce(total)
        print(world.launched, total.item(), dist.is_initialized())
    """
    names = {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    }
    ports = [str(free_port()), str(free_port())]
    ranks = []
    for rank in ("0", "1"):
        environ = dict(zip(names[launcher], (rank, "2", rank), strict=True))
        ranks.append(start(textwrap.dedent(script), ports, environ | {"MASTER_ADDR": "127.0.0.1"}))
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert output.split() == [launcher, "3.0", "False"]


def start(script: str, args: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    import os

    command = [sys.executable, "-c", script, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ})
