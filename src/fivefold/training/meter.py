"""From a step's time to the figures people compare.

MFU counts the FLOPs that the model needs, with causal attention (of a user's own model, 6 a parameter and
token: see `models/flops.py`); HFU also those that recomputation repeats. Both are fractions of the device's
dense peak for the dtype that computes, and unknown where that is.
"""

import torch

from fivefold.axes.layout import Layout
from fivefold.config import Job
from fivefold.hardware.devices import find_device
from fivefold.ledger.precision import precision_named
from fivefold.models.flops import flops_per_token
from fivefold.models.own.spec import OwnSpec


class Meter:
    """Turns a step's time into the figures people compare: tokens per second, MFU, HFU."""

    def __init__(self, job: Job, device: torch.device):
        self.tokens_per_step = job.training.global_batch * job.training.seq_len
        self.ranks = Layout.of(job).ranks
        own = isinstance(job.spec, OwnSpec)
        self.counted = "6 FLOPs a token and parameter of blocks and head" if own else "causal attention"
        flops = flops_per_token(job.spec, job.training.seq_len, attention="causal")
        self.model_flops = flops.model
        self.hardware_flops = flops.hardware(job.training.recompute)
        known = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak = known.peak_flops.get(precision_named(job.training.precision).compute) if known else None

    @property
    def convention(self) -> str:
        """What MFU means here, or why there is none."""
        if self.peak is None:
            return "unknown (no peak is known for this device)"
        return f"{self.counted}, dense peak {self.peak / 1e12:.0f} TFLOP/s"

    def figures(self, seconds: float) -> dict[str, float | None]:
        rate = self.tokens_per_step / seconds
        per_device = rate / self.ranks
        return {
            "step_time_s": seconds,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": per_device,
            "mfu": per_device * self.model_flops / self.peak if self.peak else None,
            "hfu": per_device * self.hardware_flops / self.peak if self.peak else None,
        }
