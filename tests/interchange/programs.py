"""What ranks run in the tests here; apart from them, so that ranks need not import `transformers`."""

from __future__ import annotations

from pathlib import Path

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import load_latest
from fivefold.training.run import corpus_of
from fivefold.training.start import without_weights


def first_step(job: Job, built: Built) -> tuple[float, float]:
    """Loss and gradient norm of step 1."""
    layout = built.mesh.layout
    loader = corpus_of(job).train_loader(
        8, job.training.micro_batch or 1, rank=built.mesh.data_rank, ranks=layout.data_ranks
    )
    with loader:
        result = built.step(next(iter(loader)), 0.0, 1)
    return result.loss, result.grad_norm


def started(
    world: World, jobs: dict[str, Job], runs: dict[str, Path]
) -> dict[str, list[tuple[float, float]]]:
    """Step 1 from `model.weights`, and from the checkpoint that `import-hf` wrote."""
    found = {}
    for name, job in jobs.items():
        built = build(without_weights(job), world.device)
        progress, _ = load_latest(built, runs[name])
        assert progress is not None
        found[name] = [first_step(job, build(job, world.device)), first_step(job, built)]
    return found
