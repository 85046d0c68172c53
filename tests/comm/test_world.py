"""Who a process is, by what its launcher says, and that such processes find each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from torch._C._distributed_c10d import TCPStore

from fivefold.comm import rendezvous
from fivefold.comm.world import first_host, launch_id, launch_warning, launched_world, restarted
from fivefold.problems import BadInput, BadNews

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
MEET = """
import os, time
import torch, torch.distributed as dist
from fivefold.comm.world import joined, launched_world

world = launched_world()
time.sleep(float(os.environ.get("COME_LATE_S", 0)))
with joined(world):
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
print(world.launched, total.item(), dist.is_initialized())
"""


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


def two_processes(environs: list[dict[str, str]]) -> list[list[str]]:
    """What two processes print that meet under the launcher's variables."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", **environ},
        )
        for environ in environs
    ]
    try:
        return [process.communicate(timeout=60)[0].split() for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.slow
def test_processes_of_torchrun_meet_again_after_a_restart():
    """The store is the agent's: it outlives the ranks and remembers where the first ones were.

    Rank 1 comes late, so that rank 0 would find its old address.
    """
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": "2", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in ("0", "1"):
        environ = shared | {"TORCHELASTIC_RESTART_COUNT": attempt}
        late = environ | {"RANK": "1", "LOCAL_RANK": "1", "COME_LATE_S": "2"}
        met = two_processes([environ | {"RANK": "0", "LOCAL_RANK": "0"}, late])
        assert met == [["torchrun", "3.0", "False"]] * 2


def test_ranks_meet_whose_hosts_have_counted_other_restarts():
    """A host that comes back has a new agent, which knows of no restart; rank 0 serves the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    counted = [("0", "1"), ("1", "0")]
    met = two_processes(
        [
            shared | {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": count}
            for rank, count in counted
        ]
    )
    assert met == [["torchrun", "3.0", "False"]] * 2


@pytest.mark.parametrize(
    ("environ", "name", "again"),
    [
        ({}, None, False),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}, None, False),
        ({"TORCHELASTIC_RUN_ID": "big", "TORCHELASTIC_RESTART_COUNT": "2"}, "torchrun big", True),
        ({"SLURM_JOB_ID": "7"}, "slurm 7", False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, "slurm 7", True),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}, None, False),
    ],
)
def test_a_launchers_job_and_its_restarts(environ, name, again):
    assert (launch_id(environ), restarted(environ)) == (name, again)


def test_torchrun_is_told_what_keeps_it_from_taking_a_host_back():
    two = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(launch_warning(two))
    for other in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"):
        assert launch_warning({key: value for key, value in two.items() if key != other}) is None


def test_processes_of_srun_meet():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"SLURM_NTASKS": "2", "MASTER_PORT": port}
    met = two_processes([shared | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")])
    assert met == [["slurm", "3.0", "False"]] * 2


def test_who_has_not_come_is_said_and_named(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "SAY_S", 1.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = ("127.0.0.1", probe.getsockname()[1])
    with pytest.raises(
        BadNews, match=r"rank 1 found nobody at 127\.0\.0\.1:\d+, where rank 0 of 3 should be"
    ):
        rendezvous.meet(1, 3, address, "attempt-0", False, 2.0)
    assert f"waiting for 1 of 3 ranks at 127.0.0.1:{address[1]}: rank 0" in capfd.readouterr().err
    with pytest.raises(BadNews, match=r"ranks 1, 2 of 3 did not come to 127\.0\.0\.1:\d+ within 2 s"):
        rendezvous.meet(0, 3, address, "attempt-0", True, 2.0)
    assert f"waiting for 2 of 3 ranks at 127.0.0.1:{address[1]}: ranks 1, 2" in capfd.readouterr().err
