"""`layout.auto = true`: the planner chooses what a job's layout leaves open, when the job is launched."""

from fivefold.config import Job, resolve
from fivefold.config.resolve import unplanned
from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.hardware.devices import DeviceKind, find_device
from fivefold.hardware.presets import CLUSTERS
from fivefold.planner.answer import Answer
from fivefold.planner.goal import goal_of
from fivefold.planner.keys import as_job, given_in
from fivefold.planner.search.planned import Planned
from fivefold.problems import BadInput, BadNews, Problem


def laid_out(job: Job, ranks: int, kind: DeviceKind, device: str) -> tuple[Job, Planned]:
    """The job with the best layout for `ranks` devices, and what the planner expects of it.

    Keys of the layout, the micro-batch and recomputation that the job names stay as they are. Raises
    `BadInput`, or `BadNews` when no layout fits.

    device  what the driver calls the devices, for jobs that name no cluster
    """
    if job.model.module is not None:
        raise BadInput([unplanned("layout.auto", True)])
    cluster = cluster_of(job, kind, device)
    found = Answer(goal_of(job, ranks, kind), cluster).best_with(given_in(job))
    if found.best:
        return as_job(found.best[0].setup, job), found.best[0]
    if found.nearest is not None:
        need = found.nearest.memory_gib
        raise BadNews(
            f"layout.auto: no layout fits: the leanest needs {need:.1f} GiB on each of {ranks} devices, "
            f"and a {cluster.device.name} has {cluster.device.memory_gib:g}. "
            "`fivefold plan` says what would fit."
        )
    # Nothing to choose from: say what is wrong with the keys that were given.
    resolve(job.model_copy(update={"layout": job.layout.model_copy(update={"auto": False})}), ranks, kind)
    hint = "Change training.global_batch, or the keys of the layout that are given."
    raise BadInput([Problem("layout.auto", f"there is no layout of this job for {ranks} ranks", hint)])


def cluster_of(job: Job, kind: DeviceKind, device: str) -> Cluster:
    """The cluster that a job names, or else the one that is built of such devices. Raises `BadInput`."""
    named = job.cluster.file or job.cluster.preset
    if named is not None:
        return find_cluster(named)
    if kind == "cpu":
        return CLUSTERS["laptop"]
    known = find_device(device)
    if found := next((cluster for cluster in CLUSTERS.values() if cluster.device == known), None):
        return found
    hint = "Set cluster.preset, or measure this machine: fivefold probe --out cluster.toml; cluster.file."
    raise BadInput([Problem("cluster", f"no cluster is known that is made of '{device}'", hint)])
