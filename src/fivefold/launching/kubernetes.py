"""A job for Kubernetes: a TrainJob of Kubeflow Trainer, or a JobSet.

The TrainJob is of `trainer.kubeflow.org/v1alpha1`, as of Kubeflow Trainer 2.3 (`runtimePatches`, and a grace
period among them). The JobSet is of `jobset.x-k8s.io/v1alpha2`, and needs nothing but JobSet's controller.
"""

from typing import Any, Literal

from fivefold.launching.machines import Launch
from fivefold.launching.storage import Storage
from fivefold.launching.yaml import yaml_text

Kind = Literal["trainjob", "jobset"]
RUNTIME = "torch-distributed"
NODE = "node"
"""What Kubeflow's runtime calls the job of the ranks, and their container."""
GPU = "nvidia.com/gpu"


def manifest(kind: Kind, launch: Launch, gpus: int, image: str, storage: Storage, restarts: int) -> str:
    """The text of the manifest.

    image     the container's, with fivefold in it
    storage   a claim that many nodes write (ReadWriteMany)
    restarts  of the whole JobSet; a TrainJob leaves that to its runtime
    """
    if kind == "trainjob":
        return yaml_text(_train_job(launch, gpus, image, storage))
    return yaml_text(_job_set(launch, gpus, image, storage, restarts))


def _train_job(launch: Launch, gpus: int, image: str, storage: Storage) -> dict[str, Any]:
    pod = {
        "terminationGracePeriodSeconds": _grace(launch),
        "volumes": _volumes(storage),
        "containers": [{"name": NODE, "volumeMounts": _mounts(storage)}],
    }
    patch = {"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": launch.name},
        "spec": {
            "runtimeRef": {"name": RUNTIME},
            "trainer": {
                "image": image,
                "numNodes": launch.nodes,
                "numProcPerNode": launch.ranks,
                **({"resourcesPerNode": _resources(gpus)} if gpus else {}),
                "env": _env(launch),
                "command": _command(launch, "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"),
            },
            "runtimePatches": [
                {
                    "manager": "fivefold",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
                }
            ],
        },
    }


def _job_set(launch: Launch, gpus: int, image: str, storage: Storage, restarts: int) -> dict[str, Any]:
    first = f"{launch.name}-{NODE}-0-0.{launch.name}"
    container = {
        "name": NODE,
        "image": image,
        **({"resources": _resources(gpus)} if gpus else {}),
        "env": _env(launch),
        "command": _command(launch, f"{first}:{launch.port}"),
        "volumeMounts": _mounts(storage),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _grace(launch),
        "containers": [container],
        "volumes": _volumes(storage),
    }
    job = {
        "completionMode": "Indexed",
        "parallelism": launch.nodes,
        "completions": launch.nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": launch.name},
        "spec": {
            "failurePolicy": {"maxRestarts": restarts},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _command(launch: Launch, meet: str) -> list[str]:
    torchrun = launch.torchrun(meet, launch.name)
    return [launch.python, "-m", "torch.distributed.run", *torchrun, *launch.settings]


def _grace(launch: Launch) -> int:
    """A pod's: torchrun needs a moment to end behind the ranks."""
    return launch.grace_s + 10


def _env(launch: Launch) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in launch.torchrun_env.items()]


def _resources(gpus: int) -> dict[str, Any]:
    return {"limits": {GPU: gpus}}


def _volumes(storage: Storage) -> list[dict[str, Any]]:
    return [
        {"name": "shared", "persistentVolumeClaim": {"claimName": storage.name}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]


def _mounts(storage: Storage) -> list[dict[str, str]]:
    """The shared storage; and memory that processes share: a container's own is too small for NCCL."""
    return [
        {"name": "shared", "mountPath": storage.mount},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
