"""`training.deterministic`: the same bits from the same inputs, by kernels that add in a fixed order.

On a CPU they do so anyway. On a GPU, atomic additions and the choice between kernels make results depend on
timing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fivefold.config import Job

WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""cuBLAS reads it when it starts: with workspaces of fixed size, other streams do not change its results."""


@contextmanager
def fixed_order(job: Job) -> Iterator[None]:
    """Inside the block use deterministic kernels, where the job asks for them; then all is as it was.

    Strictly for models of ours: attention's kernels are deterministic only then, and all that they use has
    such a kernel. A user's own model may use what has none: that is warned about.
    """
    if not job.training.deterministic:
        yield
        return
    cudnn = torch.backends.cudnn
    workspace = os.environ.get(WORKSPACE)
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    kernels, tried = cudnn.deterministic, cudnn.benchmark
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        if workspace not in (":4096:8", ":16:8"):
            os.environ[WORKSPACE] = FIXED
        torch.use_deterministic_algorithms(True, warn_only=job.model.module is not None)
        cudnn.deterministic, cudnn.benchmark = True, False
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        cudnn.deterministic, cudnn.benchmark = kernels, tried
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
        else:
            os.environ[WORKSPACE] = workspace
