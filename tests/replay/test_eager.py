"""What running operations one by one costs: counted on the replayed block, and on a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.ledger.work import block_work
from fivefold.models.attention import make_context
from fivefold.models.decoder import Block
from fivefold.models.presets import PRESETS
from fivefold.replay.eager import READS, eager

PRODUCTS = ("mm", "bmm", "addmm", "_scaled_dot_product_flash_attention_for_cpu")


class Made(TorchDispatchMode):
    """Counts the tensors that kernels make, and the bytes of those that no product or attention made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors, self.written = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        made = [x for x in tree_leaves(result) if torch.is_tensor(x)]
        made = [x for x in made if x.untyped_storage()._cdata not in given]
        self.tensors += len(made)
        if not name.startswith(PRODUCTS):
            self.written += sum(x.untyped_storage().nbytes() for x in made)
        return result


@pytest.mark.parametrize("model", ["tiny", "gpt2"])
def test_a_real_block_makes_as_many_tensors_and_writes_as_much(model: str) -> None:
    spec = PRESETS[model].model_copy(
        update={"dim": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16}
    )
    length = 256
    with torch.device("cpu"):
        block, x = Block(spec, 0), torch.randn(1, length, spec.dim, requires_grad=True)
    context = make_context(spec, x, torch.arange(length), None)
    with Made() as found:
        block(x, context).sum().backward()
    work, played = block_work(_setup(spec, length)), eager(spec, "cpu")
    listed = [item for item in work if item.kind == "memory"]
    others = len(work) - len(listed)
    assert played.kernels * len(listed) + others == pytest.approx(found.tensors, rel=0.1)
    moved = (1 + READS) * found.written
    assert played.traffic * sum(float(item.moved) for item in listed) == pytest.approx(moved, rel=0.2)


def _setup(spec: Any, length: int) -> Setup:
    return Setup(spec, seq_len=length, global_batch=1, precision=PRECISIONS["fp32"])


def test_what_gpus_have_one_kernel_for_takes_several_on_a_cpu() -> None:
    spec = PRESETS["tiny"]
    assert spec.norm == "rmsnorm"
    assert eager(spec, "cpu").kernels > eager(spec, "cuda").kernels > 1
    assert eager(spec, "cpu").traffic > eager(spec, "cuda").traffic > 1
