"""`verify --precision job` runs on a GPU where there is one for each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fivefold.verification import verify
from tests.cases import GEMMA, SPEC, TIED, Case
from tests.verification import planted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("spec", [SPEC, TIED, GEMMA], ids=["llama", "gpt2", "gemma2"])
def test_a_job_is_the_same_on_the_gpu(spec: dict[str, Any], precision: str, compiled: bool) -> None:
    case = Case("gpu", 1, {}, {"precision": precision, "compile": compiled}, spec=spec)
    verdict = verify(case.job(), 1, precision="job")
    assert verdict.ok, verdict.sentence()
    exact, lower = verdict.parts
    assert (exact.device, lower.device) == ("cpu", "cuda")
    assert not any("GPU kernels" in each for each in verdict.not_exercised)


def test_gradients_that_are_doubled_in_16_bits_alone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.gradients_in_16_bits_count_twice(monkeypatch)
    case = Case("gpu", 1, {}, {"precision": "bf16", "compile": True, "micro_batch": 4})
    verdict = verify(case.job(), 1, precision="job")
    assert verdict.parts[0].ok
    assert verdict.sentence().startswith("different in bf16: the gradient of ")
    assert verdict.axis is not None
    assert verdict.axis.startswith("none: one process alone differs, by precision, compilation")
