"""From a step's time to the figures people compare.

MFU counts the FLOPs that the model needs, with causal attention (of a user's own model, 6 a parameter and
token: see `models/flops.py`); HFU also those that recomputation repeats. Both are fractions of the device's
dense peak for the dtype that computes, and unknown where that is. A job with fp8 is measured against the peak
of bf16, so that it can be compared with one without, and beside it against that of 8 bits.
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
        peaks = known.peak_flops if known else {}
        self.precision = str(job.training.precision)
        self.in_fp8 = job.training.fp8 != "none"
        self.peak = peaks.get(precision_named(job.training.precision).compute)
        self.fp8_peak = peaks.get("float8") if self.in_fp8 else None

    @property
    def convention(self) -> str:
        """What MFU means here, or why there is none."""
        if self.peak is None:
            return "unknown (no peak is known for this device)"
        peak = f"{self.counted}, dense peak {self.peak / 1e12:.0f} TFLOP/s"
        if not self.in_fp8:
            return peak
        beside = f", mfu_fp8: of {self.fp8_peak / 1e12:.0f} in fp8" if self.fp8_peak else ""
        return f"{peak} in {self.precision}{beside}"

    def figures(self, seconds: float) -> dict[str, float | None]:
        rate = self.tokens_per_step / seconds
        per_device = rate / self.ranks
        found = {
            "step_time_s": seconds,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": per_device,
            "mfu": per_device * self.model_flops / self.peak if self.peak else None,
            "hfu": per_device * self.hardware_flops / self.peak if self.peak else None,
        }
        if self.in_fp8:
            found["mfu_fp8"] = per_device * self.model_flops / self.fp8_peak if self.fp8_peak else None
        return found
