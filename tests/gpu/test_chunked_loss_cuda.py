"""The loss in chunks on a GPU, whose products of 16 bits add up in float32 by themselves."""

from __future__ import annotations

import pytest
import torch

from fivefold.models.chunked_loss import chunked_loss, cross_entropy
from tests.models.test_chunked_loss import at_once, drawn, error, found

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_no_worse_than_all_at_once(dtype: torch.dtype, compiled: bool) -> None:
    parts = (part.cuda() for part in drawn(1000, 20_000, dim=64))
    x, weight, targets = (part.to(dtype) if part.is_floating_point() else part for part in parts)
    of_chunk = torch.compile(cross_entropy, dynamic=False) if compiled else cross_entropy
    times = 65536 / 1e6 if dtype == torch.float16 else 1e-3
    true = found(at_once(targets), x.double(), weight.double())
    plain = found(at_once(targets), x, weight, times)
    ours = found(lambda a, b: chunked_loss(a, b, targets, 300, of_chunk), x, weight, times)
    for mine, theirs, right in zip(ours, plain, true, strict=True):
        assert error(mine, right) <= 1.05 * error(theirs, right) + 1e-6
