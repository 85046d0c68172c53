"""Tokens per second, MFU and HFU, by hand."""

from __future__ import annotations

import pytest
import torch

from fivefold.models.flops import flops_per_token
from fivefold.training.meter import Meter
from tests.cases import Case


def test_figures_are_those_of_the_global_batch_on_all_ranks() -> None:
    training = {"global_batch": 24, "micro_batch": 2, "seq_len": 16, "recompute": "full"}
    job = Case("two", 2, {"dp_shard": 2}, training).job()
    meter = Meter(job, torch.device("cpu"))
    assert meter.figures(2.0) == {
        "step_time_s": 2.0,
        "tokens_per_s": 24 * 16 / 2.0,
        "tokens_per_s_per_device": 24 * 16 / 4.0,
        "mfu": None,
        "hfu": None,
    }
    assert "unknown" in meter.convention
    meter.peak = 1e9
    flops = flops_per_token(job.spec, 16, attention="causal")
    figures = meter.figures(2.0)
    assert figures["mfu"] == pytest.approx(96 * flops.model / 1e9)
    assert figures["hfu"] == pytest.approx(96 * flops.hardware("full") / 1e9)
    assert flops.hardware("full") > flops.model
