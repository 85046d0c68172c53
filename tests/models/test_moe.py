"""The expert layer against a written-out loop over tokens and experts, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.models.decoder import Decoder
from fivefold.models.grouped import grouped_linear
from fivefold.models.inventory import parameter_count, parameters
from fivefold.models.mlp import ACTIVATIONS
from fivefold.models.moe import Moe, permute
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.verification import gradient_error
from tests.models.zoo import built, small

EXPERTS: dict[str, Any] = {"experts": 5, "experts_per_token": 2}


def layer(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float64) -> Moe:
    """An expert layer with every weight random."""
    torch.manual_seed(seed)
    moe = Moe(spec).to(dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    return moe


def tokens(spec: ModelSpec, rows: int = 2, length: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, length, spec.dim, generator=generator, dtype=dtype, requires_grad=True)


def feed_forward(weights: dict[str, Tensor], x: Tensor, activation: str) -> Tensor:
    """One expert on one token; `weights` by the projection's name, "gate.weight" and so on."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    if "gate.weight" in weights:
        return linear("down", ACTIVATIONS[activation](linear("gate", x)) * linear("up", x))
    return linear("down", ACTIVATIONS[activation](linear("up", x)))


def written_out(moe: Moe, spec: ModelSpec, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    result = []
    stacked = dict(moe.experts.named_parameters())
    for token in x.flatten(0, 1):
        probabilities = (moe.router.weight @ token).softmax(0)
        best = probabilities.topk(moe.per_token)
        total = torch.zeros_like(token)
        for weight, expert in zip(best.values / best.values.sum(), best.indices, strict=True):
            mine = {name: parameter[expert] for name, parameter in stacked.items()}
            total = total + weight * feed_forward(mine, token, spec.activation)
        if moe.shared is not None:
            total = total + feed_forward(dict(moe.shared.named_parameters()), token, spec.activation)
        result.append(total)
    return torch.stack(result).view_as(x)


def gradients(moe: Moe, x: Tensor, loss: Tensor) -> dict[str, Tensor]:
    names = ["x", *dict(moe.named_parameters())]
    found = torch.autograd.grad(loss, [x, *moe.parameters()], allow_unused=True)
    return {name: torch.zeros(1) if g is None else g for name, g in zip(names, found, strict=True)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    error, name = gradient_error(found, expected)
    assert error <= 1e-11, name


@pytest.mark.parametrize(
    "fields",
    [
        EXPERTS,
        EXPERTS | {"mlp_bias": True, "shared_experts": 2},
        EXPERTS | {"activation": "gelu", "mlp_bias": True},
        {"experts": 3, "experts_per_token": 1, "shared_experts": 1},
        {"experts": 4, "experts_per_token": 4},
    ],
)
def test_against_a_loop_over_tokens(fields: dict[str, Any]):
    spec = small(**fields)
    moe, x = layer(spec), tokens(spec)
    found, expected = moe(x), written_out(moe, spec, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    mix = torch.randn_like(expected)
    assert_same(gradients(moe, x, (found * mix).sum()), gradients(moe, x, (expected * mix).sum()))


def test_an_expert_without_tokens_and_one_with_all():
    spec = small(**EXPERTS)
    moe = layer(spec)
    x = torch.rand(1, 6, spec.dim, dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor([-9, 3, -9, 2, -9])[:, None].expand(5, spec.dim))
    found, expected = moe(x).square().sum(), written_out(moe, spec, x).square().sum()
    mine, theirs = gradients(moe, x, found), gradients(moe, x, expected)
    assert mine["experts.up.weight"][[0, 2, 4]].count_nonzero() == 0
    assert_same(mine, theirs)


def test_derivatives_by_difference():
    spec = small(dim=4, heads=2, kv_heads=2, ffn=3, experts=3, experts_per_token=2, mlp_bias=True)
    moe, x = layer(spec), tokens(spec, 1, 3)
    assert torch.autograd.gradcheck(moe, (x,))


@pytest.mark.parametrize("counts", [[3, 0, 2, 0], [0, 0, 0, 5], [0, 0, 0, 0]])
@pytest.mark.parametrize("biased", [True, False])
def test_grouped_rows_meet_the_matrix_of_their_group(counts: list[int], biased: bool):
    rows = torch.randn(sum(counts), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 2, dtype=torch.float64, requires_grad=True) if biased else None
    group = torch.arange(4).repeat_interleave(torch.tensor(counts))
    expected = (weight[group] @ rows[..., None])[..., 0] + (0 if bias is None else bias[group])
    found = grouped_linear(rows, weight, bias, torch.tensor(counts))
    torch.testing.assert_close(found, expected)
    leaves = [leaf for leaf in (rows, weight, bias) if leaf is not None]
    mix = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((found * mix).sum(), leaves),
        torch.autograd.grad((expected * mix).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_permuting_and_its_derivative():
    rows = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(6)
    assert torch.equal(permute(rows, order, order.argsort()), rows[order])
    assert torch.autograd.gradcheck(lambda r: permute(r, order, order.argsort()), (rows,))


# --- the balancing term ------------------------------------------------------------------------------------


def balancing_term(moe: Moe, x: Tensor) -> Tensor:
    """weight x sum over rows and experts of f P, by the formula."""
    probabilities = moe.router(x).softmax(-1)
    chosen = F.one_hot(probabilities.topk(moe.per_token).indices, probabilities.shape[-1])
    experts, length = probabilities.shape[-1], x.shape[1]
    often = chosen.sum((1, 2)).double() * experts / (moe.per_token * length)
    term: Tensor = moe.balance_weight * (often * probabilities.mean(1)).sum()
    return term


@pytest.mark.parametrize("scale", [1.0, 8.0, torch.tensor(8.0, dtype=torch.float64)])
def test_the_balancing_term_reaches_backward_and_not_the_result(scale: float | Tensor):
    spec = small(**EXPERTS)
    moe, x = layer(spec), tokens(spec)
    plain = moe(x)
    plain_gradients = gradients(moe, x, plain.sum() * scale)
    moe.balance_weight, moe.loss_scale = 0.3, scale
    found = moe(x)
    assert torch.equal(found, plain)
    term = gradients(moe, x, balancing_term(moe, x) * scale)
    assert term["router.weight"].abs().max() > 1e-3
    expected = {name: plain_gradients[name] + term[name] for name in term}
    assert_same(gradients(moe, x, found.sum() * scale), expected)


def test_even_use_is_the_least_the_term_can_be():
    """With uniform probabilities and even choice the term is its weight: f = P E = 1."""
    spec = small(experts=4, experts_per_token=2)
    moe, x = layer(spec), tokens(spec, 1, 8)
    torch.nn.init.zeros_(moe.router.weight)
    moe.balance_weight = 1.0
    assert balancing_term(moe, x).item() == pytest.approx(1.0)


def test_the_term_of_a_row_in_parts_is_that_of_the_row():
    """Only the counts need to be known of the other part."""
    spec = small(**EXPERTS)
    moe, x = layer(spec), tokens(spec, 2, 8)
    moe.balance_weight = 0.3
    whole = gradients(moe, x, moe(x).sum())
    row_counts: list[Tensor] = []

    def take_down(counts: Tensor) -> Tensor:
        row_counts.append(counts)
        return counts

    moe.sum_counts = take_down  # type: ignore[method-assign]
    for part in x.split(4, dim=1):
        moe(part).sum().backward(retain_graph=True)
    moe.zero_grad()
    x.grad = None
    moe.sum_counts = lambda counts: torch.stack(row_counts).sum(0)  # type: ignore[method-assign]
    for part in x.split(4, dim=1):
        moe(part).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, whole["x"], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(moe.router.weight.grad, whole["router.weight"], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("again", [False, True])
def test_tokens_are_counted_once_a_backward_pass(again: bool):
    spec = small(**EXPERTS)
    moe, x = layer(spec), tokens(spec)
    with torch.no_grad():
        moe(x)
    assert moe.routed.sum() == 0
    for _ in range(3):
        result = checkpoint(moe, x, use_reentrant=False) if again else moe(x)
        result.sum().backward()
    chosen = moe.router(x).topk(2).indices
    assert torch.equal(moe.routed, 3 * torch.bincount(chosen.flatten(), minlength=5))


def test_recomputing_changes_no_gradient():
    spec = small(**EXPERTS, shared_experts=1)
    moe, x = layer(spec), tokens(spec)
    moe.balance_weight = 0.3
    expected = gradients(moe, x, moe(x).square().sum())
    assert_same(gradients(moe, x, checkpoint(moe, x, use_reentrant=False).square().sum()), expected)


# --- the balancing bias ------------------------------------------------------------------------------------


def test_the_bias_moves_towards_the_mean():
    moe = layer(small(experts=4, experts_per_token=2))
    moe.update_bias(torch.tensor([10, 4, 6, 4]))
    moe.update_bias(torch.tensor([10, 4, 4, 6]))
    assert moe.bias_steps.tolist() == [-2, 2, 1, 1]


def test_the_bias_changes_the_choice_and_not_the_weights():
    spec = small(**EXPERTS)
    moe, x = layer(spec), tokens(spec)
    moe.balance_rate = 0.01
    moe.bias_steps[3] = 1000
    probabilities = moe.router(x).softmax(-1)
    chosen = moe.choose(probabilities)
    assert (chosen == 3).any(-1).all()
    others = probabilities.detach().clone()
    others[..., 3] = -1
    assert torch.equal(chosen[chosen != 3], others.topk(1).indices.flatten())
    stacked = dict(moe.experts.named_parameters())
    token = x[0, 0]
    gates = probabilities[0, 0, chosen[0, 0]]
    expected = sum(
        weight * feed_forward({n: p[e] for n, p in stacked.items()}, token, "swiglu")
        for weight, e in zip(gates / gates.sum(), chosen[0, 0], strict=True)
    )
    torch.testing.assert_close(moe(x)[0, 0], expected)


def test_biased_routing_evens_out():
    """A router that prefers one expert sends evenly after enough steps."""
    spec = small(experts=4, experts_per_token=1)
    moe, x = layer(spec), tokens(spec, 4, 32)
    moe.balance_rate = 0.001
    torch.nn.init.normal_(moe.router.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        moe.router.weight[0] += 0.1 * x.detach().mean((0, 1)).sign()
    loads = []
    for _ in range(200):
        moe(x).sum().backward()
        loads.append(moe.routed.tolist())
        moe.update_bias(moe.routed)
        moe.routed.zero_()
    assert max(loads[0]) > 2 * min(loads[0])
    assert max(loads[-1]) < 1.5 * min(loads[-1])


def test_the_bias_survives_every_dtype():
    moe = layer(small(**EXPERTS))
    moe.bias_steps += 1001
    moe.to(torch.bfloat16).to(torch.float32)
    assert moe.bias_steps.tolist() == [1001] * 5


# --- routing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "per_token"), [(8, 2), (6, 4), (5, 5), (4, 1)])
def test_balanced_routing_deals_in_turn(experts: int, per_token: int):
    spec = small(experts=experts, experts_per_token=per_token)
    moe, x = layer(spec), tokens(spec, 2, 2 * experts)
    moe.routing = "balanced"
    chosen = moe.choose(moe.router(x).softmax(-1))
    assert all(len(set(token)) == per_token for token in chosen.flatten(0, 1).tolist())
    moe(x).sum().backward()
    assert moe.routed.tolist() == [2 * 2 * per_token] * experts
    assert moe.router.weight.grad is not None
    assert per_token == 1 or moe.router.weight.grad.abs().max() > 0


def test_the_router_works_in_float32_where_the_model_is_narrower():
    spec = small(**EXPERTS)
    moe = layer(spec, dtype=torch.bfloat16)
    x = tokens(spec, dtype=torch.bfloat16)
    assert moe.router(x).dtype == torch.float32
    exact = F.linear(x.double(), moe.router.weight.double())
    torch.testing.assert_close(moe.router(x).double(), exact, rtol=1e-5, atol=1e-5)
    result = moe(x)
    assert result.dtype == torch.bfloat16
    result.sum().backward()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.dtype == torch.bfloat16


# --- whole models ------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_inventory():
    spec = small(**EXPERTS, mlp_bias=True, shared_experts=2)
    with torch.device("meta"):
        model = Decoder(spec)
    found = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert found == [(p.name, p.shape) for p in parameters(spec)]


def test_buffers_start_from_zero():
    with torch.device("meta"):
        model = Decoder(small(**EXPERTS))
    model.to_empty(device="cpu")
    assert len(list(model.buffers())) == 4
    assert all(buffer.count_nonzero() == 0 for buffer in model.buffers())


def test_mixtral_is_known_whole_and_trains_small():
    spec = PRESETS["mixtral-8x7b"]
    assert parameter_count(spec) == 46_702_792_704
    with torch.device("meta"):
        model = Decoder(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) == 46_702_792_704
    shrunk = spec.model_copy(
        update={"vocab_size": 61, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
    )
    trained = built(shrunk, dtype=torch.float32)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    batch = torch.randint(0, 61, (4, 33), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(30):
        loss = trained(batch[:, :-1], batch[:, 1:]) / (4 * 32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_tiny_moe_splits_like_tiny():
    spec, tiny = PRESETS["tiny-moe"], PRESETS["tiny"]
    assert (spec.experts, spec.experts_per_token) == (8, 2)
    for field in ("vocab_size", "dim", "layers", "heads", "kv_heads"):
        assert getattr(spec, field) == getattr(tiny, field)
    assert spec.ffn % 4 == 0


@pytest.mark.slow
def test_a_compiled_block_computes_the_same():
    spec = small(**EXPERTS, shared_experts=1)
    model = built(spec)
    batch = torch.randint(0, 61, (2, 9))
    expected = model(batch, batch)
    expected.backward()
    gradient = model.blocks["0"].mlp.experts.up.weight.grad.clone()
    model.zero_grad()
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward)
    found = model(batch, batch)
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.blocks["0"].mlp.experts.up.weight.grad, gradient)
