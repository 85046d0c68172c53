from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from fivefold.models.attention import Context, make_context, places
from fivefold.models.decoder import Decoder
from fivefold.models.loss import summed_cross_entropy
from tests.models.zoo import GEMMA, built, small, small_specs

KINDS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": {"positions": "learned", "norm": "layernorm", "activation": "gelu", "mlp_bias": True},
    "window": {"sliding_window": 5},
    "parallel": {"parallel_block": True, "kv_heads": 1, "tied": True},
    "qk_norm": {"qk_norm": True, "qkv_bias": True},
    "some windows": {"sliding_window": 5, "full_attention_every": 2},
    "gemma": GEMMA,
}


def gradients(model: Decoder, loss: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()))
    return {name: grad for (name, _), grad in zip(model.named_parameters(), found, strict=True)}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        error = (got[name] - want[name]).abs().max().item()
        assert error <= tolerance, f"{name} is off by {error}"


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_compute_as_if_alone(kind: str):
    torch.manual_seed(0)
    model = built(small(**KINDS[kind]))
    lengths = (7, 12, 1, 5)
    tokens, targets = torch.randint(0, 61, (2, 1, sum(lengths)))
    documents = torch.repeat_interleave(torch.tensor([3, 9, 2, 4]), torch.tensor(lengths))[None]

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    packed = losses(model(tokens, documents=documents), targets)
    pieces = zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True)
    alone = torch.cat([losses(model(some), wanted) for some, wanted in pieces], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    assert_close(gradients(model, packed.sum()), gradients(model, alone.sum()), 1e-11)
    assert (packed - losses(model(tokens), targets)).abs().max() > 1e-3, "the documents make no difference"


def test_places_start_again_with_each_document():
    documents = torch.tensor([[4, 4, 4, 1, 1, 9], [0, 0, 0, 0, 0, 0]])
    assert places(documents, documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert places(documents, None).tolist() == [0, 1, 2, 3, 4, 5]


def test_given_positions_are_used():
    tokens = torch.randint(0, 61, (2, 8))
    for kind in ("rope", "learned"):
        model = built(small(**KINDS[kind]))
        torch.testing.assert_close(model(tokens, positions=torch.arange(8)), model(tokens), rtol=0, atol=0)
        stretched = model(tokens, positions=3 * torch.arange(8).expand(2, 8))
        assert (stretched - model(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_a_later_one(kind: str):
    model = built(small(**KINDS[kind]))
    tokens = torch.randint(0, 60, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:10].max() == 0
    assert (difference[10:12] > 0).all()


def test_a_window_reaches_as_far_as_its_layers_pass_it_on():
    model = built(small(sliding_window=3, layers=2))
    tokens = torch.randint(0, 60, (1, 16))
    changed = tokens.clone()
    changed[0, 4] += 1
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert (difference[4:9] > 0).all()
    assert difference[9:].max() == 0


def test_a_parallel_block_adds_both_halves_to_one_norm():
    spec = small(parallel_block=True)
    block = built(spec).blocks["0"]
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    context = make_context(spec, x, torch.arange(5), None)
    normed = F.rms_norm(x, (24,), block.attention_norm.weight, spec.norm_eps)
    expected = x + block.attention(normed, context) + block.mlp(normed)
    torch.testing.assert_close(block(x, context), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("relu", lambda x: x.clamp(min=0)),
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
        ("gelu-tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    ],
)
def test_activations_are_their_formulas(activation, formula):
    mlp = built(small(activation=activation)).blocks["0"].mlp
    x = torch.randn(3, 24, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), formula(x @ mlp.up.weight.T) @ mlp.down.weight.T)


def test_the_loss_is_a_sum_over_the_tokens_that_count():
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (2, 5))
    targets[0, 1:3] = targets[1, 4] = -100
    places_that_count = [(b, s) for b in range(2) for s in range(5) if targets[b, s] >= 0]
    assert len(places_that_count) == 7
    expected = -torch.stack([logits[at].log_softmax(-1)[targets[at]] for at in places_that_count]).sum()
    got = summed_cross_entropy(logits, targets)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, logits), torch.autograd.grad(expected, logits))
    nothing = summed_cross_entropy(logits, torch.full_like(targets, -100))
    assert nothing == 0
    assert torch.autograd.grad(nothing, logits)[0].abs().max() == 0


def test_the_loss_of_a_narrow_model_is_summed_in_float32():
    logits = torch.randn(4, 9).bfloat16()
    targets = torch.randint(0, 9, (4,))
    assert torch.equal(summed_cross_entropy(logits, targets), summed_cross_entropy(logits.float(), targets))


def test_a_batch_is_the_sum_of_its_sequences():
    model = built(small())
    tokens, targets = torch.randint(0, 61, (2, 4, 9))
    targets[2, 3:] = -100
    whole = model(tokens, targets)
    parts = sum(model(tokens[i : i + 1], targets[i : i + 1]) for i in range(4))
    torch.testing.assert_close(whole, parts, rtol=1e-13, atol=0)
    assert_close(gradients(model, whole), gradients(model, parts), 1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_computes_in_its_dtype(kind: str, dtype: torch.dtype):
    model = built(small(**KINDS[kind]), dtype=dtype)
    seen = []
    for block in model.blocks.values():
        block.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0].dtype, out.dtype)))
    tokens = torch.randint(0, 61, (2, 9))
    assert model(tokens).dtype == dtype
    assert seen == [(dtype, dtype)] * 2
    loss = model(tokens, tokens)
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(parameter.grad.dtype == dtype for parameter in model.parameters())


def test_norms_of_a_narrow_model_work_in_float32():
    x = (torch.randn(4, 24) * 8).bfloat16()
    for kind in ("rope", "learned"):
        norm = built(small(**KINDS[kind]), dtype=torch.bfloat16).head.norm
        exact = built(small(**KINDS[kind]), dtype=torch.float64).head.norm
        exact.load_state_dict(norm.state_dict())
        error = (norm(x).double() - exact(x.double())).abs() / exact(x.double()).abs().clamp(min=0.1)
        assert error.max() < 2**-7, "more than the rounding of a result"


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_tied_weights_are_one_parameter_through_every_move(positions: str):
    spec = small(tied=True, positions=positions)
    model = built(spec, dtype=torch.float32)
    assert model.head.output.weight is model.embedding.tokens.weight
    model.double()
    assert model.head.output.weight is model.embedding.tokens.weight
    tokens = torch.randint(0, 61, (1, 4))
    untied = built(small(tied=False, positions=positions))
    untied.load_state_dict({**model.state_dict(), "head.output.weight": model.embedding.tokens.weight})
    torch.testing.assert_close(model(tokens), untied(tokens), rtol=0, atol=0)
    both = gradients(untied, untied(tokens, tokens))
    tied = gradients(model, model(tokens, tokens))
    together = both["embedding.tokens.weight"] + both["head.output.weight"]
    torch.testing.assert_close(tied["embedding.tokens.weight"], together, rtol=0, atol=1e-12)


def test_parts_of_a_model_make_the_whole():
    """A model without its embedding takes hidden states; one without its head returns them."""
    tokens, targets = torch.randint(0, 61, (2, 2, 9))
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    first, last = built(small()), built(small())
    whole = built(small())(tokens, targets, documents)
    first.head, first.blocks = None, nn.ModuleDict({"0": first.blocks["0"]})
    last.embedding, last.blocks = (
        None,
        nn.ModuleDict({name: block for name, block in last.blocks.items() if name != "0"}),
    )
    hidden = first(tokens, documents=documents)
    assert hidden.shape == (2, 9, 24)
    torch.testing.assert_close(last(hidden, targets, documents), whole, rtol=0, atol=0)


def test_the_loop_over_blocks_can_be_replaced():
    model = built(small())
    seen = []

    def run_blocks(x: Tensor, context: Context) -> Tensor:
        seen.append(x.shape)
        return x

    model.run_blocks = run_blocks
    tokens = torch.randint(0, 61, (2, 9))
    torch.testing.assert_close(model(tokens), model.head(model.embedding(tokens, torch.arange(9)), None))
    assert len(seen) == 1


@settings(max_examples=25, deadline=None)
@given(small_specs())
def test_every_parameter_of_any_model_gets_a_gradient(spec):
    model = built(spec)
    tokens = torch.randint(0, spec.vocab_size, (2, 8))
    found = gradients(model, model(tokens, tokens, torch.tensor([[0] * 8, [1] * 3 + [2] * 5])))
    assert all(torch.isfinite(grad).all() for grad in found.values())
    assert model(tokens).shape == (2, 8, spec.vocab_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_and_head_compile_whole(kind: str, masked: bool):
    spec = small(**KINDS[kind])
    model = built(spec)
    torch._dynamo.reset()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9]) if masked else None
    context = make_context(spec, x, places(x, documents), documents)
    block, head = model.blocks["0"], model.head
    compiled = torch.compile(block.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, context), block(x, context))
    targets = torch.randint(0, 61, (2, 9))
    compiled = torch.compile(head.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, targets), head(x, targets))
