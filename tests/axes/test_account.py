"""The plan is the program: a live rank holds and sends what the ledger says."""

from __future__ import annotations

import subprocess
import sys
import weakref
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fivefold.axes.data import sharded_groups
from fivefold.axes.layout import Place
from fivefold.axes.runtime.fp8_gather import GatheredWeight
from fivefold.config import Job
from fivefold.models.inventory import parameter_count, parameters
from fivefold.replay.account import account
from fivefold.training.build import Built
from tests.cases import SPEC, TIED, Case, batches, built_on_cpu
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

EVEN = SPEC | {"vocab_size": 64}  # everything divides by 2 and 4: no padding
SIXTEENS = EVEN | {"dim": 64}  # and by 16, on 2 ranks of tp


def cases() -> dict[str, Case]:
    found = []
    specs = {"even": EVEN, "padded": SPEC, "tied": TIED}
    for (name, spec), zero, micro, precision in product(specs.items(), range(4), (4, 1), ("fp32", "bf16")):
        if name != "padded" and (micro == 4) != (precision == "fp32"):
            continue
        layout = {"zero": zero, "bucket_mb": 0.02}
        training = {"micro_batch": micro, "precision": precision}
        found.append(Case(f"{name} zero{zero} micro{micro} {precision}", 2, layout, training, spec=spec))
    for zero in (2, 3):
        layout = {"zero": zero, "reduce": "step"}
        found.append(Case(f"even zero{zero} reduce-by-step", 2, layout, {"micro_batch": 1}, spec=EVEN))
    for mode in ("full", "every-2", "sqrt", "selective"):
        found.append(Case(f"recompute {mode}", 2, {"zero": 3}, {"micro_batch": 2, "recompute": mode}))
    found.append(Case("ema", 2, {"zero": 3}, optimizer={"ema": 0.99}))
    for zero in (0, 3):
        layout, training = {"zero": zero, "bucket_mb": 0.02}, {"precision": "bf16"}
        for states in ("bf16", "int8"):
            found.append(
                Case(f"{states} states zero{zero}", 2, layout, training, {"states": states, "ema": 0.99})
            )
        found.append(Case(f"offload zero{zero}", 2, layout, training, {"offload": True, "ema": 0.99}))
    found.append(Case("sgd", 2, {"zero": 1}, optimizer={"name": "sgd"}))
    for zero in (1, 2, 3):
        layout = {"zero": zero, "dp_replicate": 2, "dp_shard": 2}
        found.append(Case(f"hsdp zero{zero}", 4, layout, {"micro_batch": 1}))
    found.append(Case("zero3 on 4", 4, {"zero": 3}))
    fp32, int8, bf16 = {"precision": "fp32"}, {"compress": "int8"}, {"compress": "bf16"}
    for ranks in (2, 4):
        layout = {"zero": 0, "bucket_mb": 0.02}
        found.append(Case(f"int8 on {ranks}", ranks, layout, fp32, communication=int8))
    for zero, rounds in ((0, bf16), (1, int8), (2, bf16), (3, int8 | {"error_feedback": False}), (3, int8)):
        training = fp32 | {"micro_batch": 2}
        name = f"{rounds['compress']} zero{zero} {len(rounds)}"
        found.append(Case(name, 2, {"zero": zero}, training, communication=rounds))
    for on in ("all", "replicate"):
        layout, training = (
            {"zero": 3, "dp_replicate": 2, "dp_shard": 2},
            {"precision": "bf16", "micro_batch": 1},
        )
        communication = int8 | {"compress_on": on}
        found.append(Case(f"int8 hsdp on {on}", 4, layout, training, communication=communication))
    in_fp8 = {"precision": "bf16", "fp8": "tensorwise", "fp8_small": True, "fp8_head": True}
    for zero, more in ((1, {}), (2, {"fp8_first": 1, "fp8_last": 1}), (3, {"micro_batch": 1})):
        found.append(Case(f"fp8 zero{zero}", 2, {"zero": zero}, in_fp8 | more, spec=SIXTEENS))
    tied = Case("fp8 tied", 2, {"zero": 3}, in_fp8 | {"fp8_head": False}, spec=SIXTEENS | {"tied": True})
    recomputed = in_fp8 | {"micro_batch": 2, "recompute": "every-2"}
    found += [tied, Case("fp8 recompute every-2", 2, {"zero": 3}, recomputed, spec=SIXTEENS)]
    return {case.name: case for case in found}


CASES = cases()


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors, shared memory counted once.

    Runs no operation: selective recompute would see it and be confused.
    """
    own = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    plain = [t.numbers if isinstance(t, GatheredWeight) else t for t in own]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}.values())


class Census:
    """Counts a model's live weights and gradients wherever one of them comes or goes during a step."""

    def __init__(self, built: Built):
        self.built = built
        self.peak = {"weights": 0, "gradients": 0}
        for module in built.model.modules():
            if not list(module.children()):
                module.register_forward_hook(self.look)
        for parameter in built.model.parameters():
            if not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(self.look)
        for record in fsdp_records(built.model, "fsdp_params"):
            record._unsharded_param.register_post_accumulate_grad_hook(self.look)
        self.waiting: list[weakref.ref[torch.Tensor]] = []
        if built.job.spec.tied:
            assert built.model.head is not None
            built.model.head.output.register_forward_hook(self.watch_tied_weight)

    def watch_tied_weight(self, module: nn.Module, args: Any, output: Any) -> None:
        """Autograd keeps the head's gradient of a tied weight to itself until the embedding's is there."""
        product = output.grad_fn.next_functions[0][0]
        transpose = next(node for node, _ in product.next_functions if node.name() == "TBackward0")
        transpose.register_hook(lambda gradients, _: self.waiting.append(weakref.ref(gradients[0])))

    def look(self, *unused: Any) -> None:
        for role, count in self.count().items():
            self.peak[role] = max(self.peak[role], count)

    def count(self) -> dict[str, int]:
        """FSDP puts gathered weights in place of their shards: they are the plain parameters."""
        weights = [p for p in self.built.model.parameters() if not isinstance(p, DTensor)]
        holders = [*weights, *self.built.weights.parameters, *self.built.weights.holders]
        gradients = [holder.grad for holder in holders]
        for record in fsdp_records(self.built.model, "fsdp_params"):
            gradients += [record.unsharded_accumulated_grad, record._unsharded_param.grad]
        gradients += [reference() for reference in self.waiting]
        gradients += fsdp_records(self.built.model, "_partial_reduce_output")
        return {
            "weights": storage_bytes(list(weights)),
            "gradients": storage_bytes([g for g in gradients if g is not None]),
        }


def fsdp_records(model: nn.Module, attribute: str) -> list[Any]:
    """FSDP's own books, for gradients that it keeps to itself between micro-batches (torch 2.11 to 2.13)."""
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in filter(None, groups):
                value = getattr(group, attribute)
                found += value if isinstance(value, list) else [value]
    return found


def live(job: Job) -> dict[str, Any]:
    """What a rank held and sent in its third step."""
    built = built_on_cpu(job)
    tracer = MessageTracer(built.mesh)
    with batches(job, built) as loader:
        steps = iter(loader)
        for step in (1, 2):
            built.step(next(steps), 1e-3, step)
        with tracer:
            built.step(next(steps), 1e-3, 3)
        census = Census(built)
        micro_batches = next(steps)
        tokens = built.step.count_tokens(micro_batches)
        built.step.backward(micro_batches, tokens)
    built.step.collect()
    rest = census.count()
    census.look()
    masters = storage_bytes(built.weights.masters) if built.weights.sharded or built.weights.copied else 0
    residuals = [residual.value for residual in built.step.residuals.all]
    states = masters + storage_bytes([*built.optimizer.tensors(), *residuals])
    if built.optimizer.offloaded is not None:
        states -= built.optimizer.offloaded.host_bytes
    return {
        "traffic": tracer.traffic(),
        "rest": rest | {"states": states},
        "peak": census.peak,
        "place": built.mesh.place,
    }


def live_on(world: Any, job: Job) -> dict[str, Any]:
    return live(job)


@cache
def live_ranks(name: str) -> list[dict[str, Any]]:
    return on_ranks(live_on, CASES[name].ranks, CASES[name].job())


@pytest.mark.parametrize("name", CASES)
def test_messages_of_a_steady_step(name: str) -> None:
    expected = account(CASES[name].job()).traffic()
    assert expected
    for found in live_ranks(name):
        assert found["traffic"] == expected


@pytest.mark.parametrize("name", CASES)
def test_bytes_at_rest(name: str) -> None:
    for found in live_ranks(name):
        ledger = account(CASES[name].job(), found["place"])
        assert {role: ledger.rest(role) for role in ("weights", "gradients", "states")} == found["rest"]


@pytest.mark.parametrize("name", CASES)
def test_bytes_at_peak(name: str) -> None:
    for found in live_ranks(name):
        ledger = account(CASES[name].job(), found["place"])
        assert {role: ledger.peak(role) for role in ("weights", "gradients")} == found["peak"]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_zero_table(zero: int, ranks: int) -> None:
    """Model 2, gradients 4, states 12 bytes a parameter (bf16), each over the ranks from its stage on.

    The layer that is in backward, or gathered, comes on top of what the table divides.
    """
    job = Case("table", ranks, {"zero": zero}, {"micro_batch": 1, "precision": "bf16"}, spec=EVEN).job()
    n = parameter_count(job.spec)
    layer = 2 * max(sum(p.count for p in group.members) for group in sharded_groups(job, Place()))
    counters = 4 * len(parameters(job.spec))
    ledger = account(job)
    model, gradients, states = (2 * n, 4 * n, 12 * n)
    if zero == 3:
        assert ledger.peak("weights") == layer
    else:
        assert ledger.peak("weights") == model
    if zero == 0:
        assert ledger.peak("gradients") == gradients
    else:
        whole = gradients if zero == 1 else gradients // ranks
        assert whole < ledger.peak("gradients") <= whole + layer
        assert ledger.rest("gradients") == gradients // ranks
    assert ledger.rest("states") - counters == (states if zero == 0 else states // ranks)
    if zero > 0:
        assert (
            sum(ledger.rest(role) for role in ("weights", "gradients", "states")) - counters
            == 16 * n // ranks
        )


WITHOUT_TORCH = """
import sys
from fivefold.replay.account import account
from fivefold.config import load, resolve

for words in {layouts!r}:
    job = resolve(load(preset="tiny", overrides=words.split()), 2)
    assert account(job).messages
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def test_the_ledger_needs_no_torch() -> None:
    layouts = [
        "--layout.zero 0 --layout.dp_replicate 2",
        "--layout.zero 0 --layout.dp_replicate 2 --communication.compress int8",
        "--layout.zero 3 --layout.dp_shard 2",
        "--layout.tp 2",
        "--layout.cp 2",
        "--layout.pp 2",
    ]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(layouts=layouts)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
