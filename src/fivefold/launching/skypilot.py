"""A task of SkyPilot: machines of any cloud, the current folder on them, and torchrun on each."""

import shlex

from fivefold.launching.gpus import Gpus
from fivefold.launching.machines import Launch
from fivefold.launching.storage import Storage
from fivefold.launching.yaml import yaml_text

FIRST = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
OWN = '$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")'


def task(
    launch: Launch, gpus: Gpus, storage: Storage, restarts: int, folder: str, setup: str | None = None
) -> str:
    """The text of the task.

    storage   a volume of SkyPilot, or the address of a bucket
    restarts  how often a managed job (`sky jobs launch`) that failed is started again
    folder    what is copied onto the machines, and where the command runs there
    setup     a line of shell that prepares a machine
    """
    torchrun = launch.torchrun("MEET", launch.name, "--local-addr=OWN")
    words = shlex.join([launch.python, "-m", "torch.distributed.run", *torchrun, *launch.settings])
    command = words.replace("=MEET", f'="$first:{launch.port}"', 1).replace("=OWN", '="$own"', 1)
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
            "run": f"first={FIRST}\nown={OWN}\nexec {command}\n",
        }
    )


def _mounted(storage: Storage) -> dict[str, object]:
    if "://" in storage.name:
        return {"file_mounts": {storage.mount: {"source": storage.name, "mode": "MOUNT"}}}
    return {"volumes": {storage.mount: storage.name}}
