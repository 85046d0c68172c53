"""What a verdict says nothing about, so that nobody takes it for more than it is."""

import torch

from fivefold.axes.layout import Layout
from fivefold.config import Job
from fivefold.models.own.spec import OwnSpec
from fivefold.verification.compute import Computed
from fivefold.verification.verdict import Part


def not_exercised(job: Job, small: Job, parts: list[Part], reference: Computed) -> list[str]:
    """A sentence each, of a resolved job, its small copy, what was compared, and one process's numbers."""
    lower = parts[1] if len(parts) > 1 else None
    found = ["data: random tokens stand in for the job's"]
    ranks, gpus = Layout.of(job).ranks, torch.cuda.device_count()
    if all(part.device == "cpu" for part in parts):
        few = lower is not None and 0 < gpus < ranks
        why = f", since this machine has {gpus} GPUs for {ranks} ranks" if few else ""
        found.append(f"GPU kernels and NCCL: all ran on the CPU, over gloo{why}")
    elif ranks > 1:
        found.append("float64 over NCCL: that part ran on the CPU, over gloo")
    if lower is None and job.training.precision != "fp64":
        found.append(f"rounding in {job.training.precision}: ask for it with --precision job")
    if (states := job.optimizer.states) != "fp32" and lower is None:
        found.append(f"optimizer.states = '{states}', which rounds moments: ask for it with --precision job")
    if job.training.compile and lower is None:
        found.append("training.compile: ask for it with --precision job")
    if job.training.fp8 != "none":
        if lower is None:
            found.append("training.fp8, left out in float64: ask for it with --precision job")
        elif job.training.fp8_first or job.training.fp8_last:
            found.append("training.fp8_first and fp8_last: all blocks of the copy took part")
    if lower is not None and lower.precision != "fp64" and job.training.routing == "learned":
        found.append(
            f"learned routing in {lower.precision}, where rounding alone sends tokens to other experts: "
            "they were dealt to the experts in turn"
        )
    if lower is not None and lower.precision != "fp64" and job.optimizer.name == "muon":
        found.append(
            f"Muon in {lower.precision}, which may make rounding 485 times as large: AdamW stood in for it"
        )
    if job.communication.compress != "none":
        found.append(f"communication.compress = '{job.communication.compress}', which rounds gradients")
    if job.communication.takes_outer_steps:
        found.append("outer steps: in the copy every step sums gradients over replicas")
    if job.communication.tp_overlap and (lower is None or lower.device == "cpu"):
        found.append("communication.tp_overlap, which takes GPUs")
    if job.model.weights is not None:
        found.append("model.weights: the copy starts from random weights")
    if not isinstance(job.spec, OwnSpec) and small.spec.layers < job.spec.layers:
        found.append("full size: what rounding and kernels do there")
    if job.training.clip and any(step.grad_norm <= small.training.clip for step in reference.steps):
        found.append(f"clipping: the gradient norm stayed below {small.training.clip}")
    found.append("speed, memory and checkpoints")
    return found
