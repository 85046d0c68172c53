"""A task of SkyPilot: machines of any cloud, the current folder on them, and torchrun on each."""

import shlex

from fivefold.launching.gpus import Gpus
from fivefold.launching.machines import Launch
from fivefold.launching.storage import Storage
from fivefold.launching.yaml import yaml_text

BEGIN = """\
first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
own=$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")
serves=$([ "$SKYPILOT_NODE_RANK" = 0 ] && echo true || echo false)
"""


def task(
    launch: Launch, gpus: Gpus, storage: Storage, restarts: int, folder: str, setup: str | None = None
) -> str:
    """The text of the task.

    storage   a volume of SkyPilot, or the address of a bucket
    restarts  how often a managed job (`sky jobs launch`) that failed is started again
    folder    what is copied onto the machines, and where the command runs there
    setup     a line of shell that prepares a machine
    """
    options = ("--local-addr=$own", "--rdzv-conf=is_host=$serves")  # hosts need not know their own addresses
    torchrun = [_expanded(word) for word in launch.torchrun(f"$first:{launch.port}", launch.name, *options)]
    command = " ".join([launch.python, "-m torch.distributed.run", *torchrun, shlex.join(launch.settings)])
    return yaml_text(
        {
            "name": launch.name,
            "num_nodes": launch.nodes,
            "workdir": folder,
            "resources": {
                **({"accelerators": str(gpus)} if gpus.count else {}),
                "job_recovery": {"max_restarts_on_errors": restarts},
            },
            "envs": launch.torchrun_env,
            **_mounted(storage),
            **({"setup": f"{setup}\n"} if setup else {}),
            "run": f"{BEGIN}exec {command}\n",
        }
    )


def _mounted(storage: Storage) -> dict[str, object]:
    if "://" in storage.name:
        return {"file_mounts": {storage.mount: {"source": storage.name, "mode": "MOUNT"}}}
    return {"volumes": {storage.mount: storage.name}}


def _expanded(word: str) -> str:
    """A word in which the shell replaces variables."""
    return f'"{word}"' if "$" in word else word
