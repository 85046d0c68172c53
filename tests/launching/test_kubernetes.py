"""Manifests for Kubernetes, held to the fields and types of their API."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from fivefold.config import load
from fivefold.launching.kubernetes import manifest
from fivefold.launching.machines import Launch
from fivefold.launching.storage import Storage
from tests.launching.schema import Optional, misfits

# Fields that we write, with their types, of the API as it was read:
# - Kubeflow Trainer v2.3.0, pkg/apis/trainer/v1alpha1/trainjob_types.go (TrainJobSpec, Trainer, RuntimePatch,
#   PodSpecPatch, ContainerPatch)
# - JobSet v0.12.0, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
# - Kubernetes core/v1 and batch/v1
ENV = [{"name": str, "value": str}]
MOUNTS = [{"name": str, "mountPath": str}]
VOLUMES = [
    {
        "name": str,
        "persistentVolumeClaim": Optional({"claimName": str}),
        "emptyDir": Optional({"medium": str}),
    }
]
RESOURCES = {"limits": {"nvidia.com/gpu": int}}
TRAIN_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "runtimeRef": {"name": str},
        "trainer": {
            "image": str,
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": Optional(RESOURCES),
            "env": ENV,
            "command": [str],
        },
        "runtimePatches": [
            {
                "manager": str,
                "trainingRuntimeSpec": {
                    "template": {
                        "spec": {
                            "replicatedJobs": [
                                {
                                    "name": str,
                                    "template": {
                                        "spec": {
                                            "template": {
                                                "spec": {
                                                    "terminationGracePeriodSeconds": int,
                                                    "volumes": VOLUMES,
                                                    "containers": [{"name": str, "volumeMounts": MOUNTS}],
                                                }
                                            }
                                        }
                                    },
                                }
                            ]
                        }
                    }
                },
            }
        ],
    },
}
JOB_SET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [
            {
                "name": str,
                "replicas": int,
                "template": {
                    "spec": {
                        "completionMode": str,
                        "parallelism": int,
                        "completions": int,
                        "backoffLimit": int,
                        "template": {
                            "spec": {
                                "restartPolicy": str,
                                "terminationGracePeriodSeconds": int,
                                "volumes": VOLUMES,
                                "containers": [
                                    {
                                        "name": str,
                                        "image": str,
                                        "resources": Optional(RESOURCES),
                                        "env": ENV,
                                        "command": [str],
                                        "volumeMounts": MOUNTS,
                                    }
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}
RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
"""Variables that Kubeflow sets itself, and refuses from a TrainJob."""

JOB = load(None, "tiny", ["--run.folder=/shared/runs/Big_1", "--layout.dp_shard=16", "--data.source=a b.txt"])
LAUNCH = Launch(JOB, 4, 4, ["unused.toml"], env={"NCCL_DEBUG": "INFO"}, grace_s=90)


def written(kind: Any, gpus: int = 4) -> Any:
    return yaml.safe_load(manifest(kind, LAUNCH, gpus, "registry/image:1", Storage("claim", "/shared"), 7))


def pod_of(kind: str, found: Any) -> Any:
    patch = (
        found["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"] if kind == "trainjob" else found
    )
    return patch["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def main_of(kind: str, found: Any) -> Any:
    return found["spec"]["trainer"] if kind == "trainjob" else pod_of(kind, found)["containers"][0]


@pytest.mark.parametrize("gpus", [4, 0])
@pytest.mark.parametrize(("kind", "schema"), [("trainjob", TRAIN_JOB), ("jobset", JOB_SET)])
def test_fields_are_those_of_the_api(kind, schema, gpus):
    assert misfits(written(kind, gpus), schema) == []


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_what_is_asked_for(kind):
    found = written(kind)
    main, pod = main_of(kind, found), pod_of(kind, found)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found["metadata"]["name"])
    assert main["image"] == "registry/image:1"
    assert not RESERVED & {variable["name"] for variable in main["env"]}
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in main["env"]
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "90"} in main["env"]
    assert pod["terminationGracePeriodSeconds"] > 90
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = pod["containers"][0]["volumeMounts"]
    assert volumes == {mount["name"] for mount in mounts}
    assert {"name": "shared", "mountPath": "/shared"} in mounts


def test_machines_ranks_and_gpus():
    trainer = written("trainjob")["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    spec = written("jobset")["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], spec["failurePolicy"]["maxRestarts"]) == (4, 4, 7)


@pytest.mark.parametrize(
    ("kind", "meet"),
    [("trainjob", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"), ("jobset", "big-1-node-0-0.big-1:29400")],
)
def test_the_command_is_the_whole_job(kind, meet):
    command = main_of(kind, written(kind))["command"]
    assert command[:3] == ["python", "-m", "torch.distributed.run"]
    assert f"--rdzv-endpoint={meet}" in command
    at = command.index("train")
    assert command[at - 2 : at] == ["-m", "fivefold"]
    assert load(None, None, command[at + 1 :]) == JOB


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_kubectl_reads_it(tmp_path, kind):
    """Its kustomize does so without a cluster; `kubectl create` would ask the server for the kinds."""
    text = manifest(kind, LAUNCH, 4, "registry/image:1", Storage("claim", "/shared"), 7)
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "kustomization.yaml").write_text("resources: [job.yaml]\n")
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("value", "said"),
    [({"a": "1"}, ".a: '1' is no int"), ({}, ".a: is missing"), ({"a": 1, "b": 2}, ".b: is not known")],
)
def test_a_misfit_is_found(value, said):
    assert misfits(value, {"a": int, "c": Optional(str)}) == [said]
