import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.models import initial
from fivefold.models.initial import initial_values, initialise
from fivefold.models.inventory import parameters
from tests.models.zoo import built, small

SPEC = small(init_std=0.02, layers=8)
SHAPE = (512, 384)


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    return initial_values(SPEC, "a.weight", SHAPE, seed=7, dtype=torch.float64)


@st.composite
def slabs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape of one to three dimensions, and the offset and shape of a slab inside."""
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    offset = [draw(st.integers(0, size)) for size in shape]
    local = [draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True)]
    return tuple(shape), tuple(offset), tuple(local)


@settings(max_examples=150, deadline=None)
@given(slabs(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(0, 2**63))
def test_a_slab_is_that_slice_of_the_whole(slab, dtype, seed):
    shape, offset, local = slab
    every = initial_values(SPEC, "a.weight", shape, seed, dtype=dtype)
    some = initial_values(SPEC, "a.weight", shape, seed, offset, local, dtype=dtype)
    place = tuple(slice(start, start + size) for start, size in zip(offset, local, strict=True))
    assert some.shape == local
    assert torch.equal(some, every[place])


def test_working_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch, whole: torch.Tensor):
    for size in (1000, 7777, 1 << 17):
        monkeypatch.setattr(initial, "CHUNK", size)
        assert torch.equal(initial_values(SPEC, "a.weight", SHAPE, seed=7, dtype=torch.float64), whole)


def by_hand(seed: int, name: str, index: int) -> float:
    """The same numbers in Python's own integers."""
    word = (1 << 64) - 1
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    z = (key + index * 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    z ^= z >> 31
    radius = math.sqrt(-2 * math.log(((z >> 32) + 0.5) / 2**32))
    return radius * math.cos(2 * math.pi * (z % 2**32) / 2**32)


def test_values_stay_the_same_from_one_version_to_the_next():
    """Checkpoints and published losses rest on these numbers: they must not drift."""
    name = "blocks.0.mlp.up.weight"
    got = initial_values(small(init_std=1.0), name, (40, 5), seed=0, dtype=torch.float64)
    expected = torch.tensor([by_hand(0, name, index) for index in range(200)], dtype=torch.float64)
    torch.testing.assert_close(got.flatten(), expected, rtol=1e-12, atol=1e-14)
    assert got[0, 0].item() == pytest.approx(-1.175846875842853, rel=1e-12)


def test_indices_beyond_32_bits_count():
    """The last elements of a tensor too large to be made whole."""
    shape = (400_000, 50_000)
    got = initial_values(
        small(init_std=1.0), "a.weight", shape, 0, (399_999, 49_998), (1, 2), dtype=torch.float64
    )
    last = 400_000 * 50_000 - 1
    assert got[0].tolist() == pytest.approx([by_hand(0, "a.weight", last - 1), by_hand(0, "a.weight", last)])


def test_values_are_normal(whole: torch.Tensor):
    unit = whole.flatten() / SPEC.init_std
    n = unit.numel()
    assert abs(unit.mean()) < 5 / math.sqrt(n)
    assert abs(unit.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((unit**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((unit**4).mean() - 3) < 5 * math.sqrt(96 / n)
    ordered = unit.sort().values
    expected = torch.special.ndtr(ordered)
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (steps - expected).abs().max() < 2 / math.sqrt(n)
    assert 4 < unit.abs().max() < 6.8


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()) * math.sqrt(a.numel())


def test_neighbours_names_and_seeds_have_nothing_in_common(whole: torch.Tensor):
    flat = whole.flatten()
    for lag in (1, 2, 3, 4, 8, 64, 383, 384, 385, 4096):
        assert correlation(flat[lag:], flat[:-lag]) < 5, lag
        assert correlation(flat[lag:] ** 2, flat[:-lag] ** 2) < 5, lag
    for name, seed in (("a.weight", 8), ("a.weight", 6), ("b.weight", 7), ("a.weights", 7), ("aweight", 70)):
        other = initial_values(SPEC, name, SHAPE, seed, dtype=torch.float64)
        assert correlation(whole, other) < 5, (name, seed)
        assert correlation(whole**2, other**2) < 5, (name, seed)


def test_what_each_kind_of_parameter_starts_from():
    spec = small(
        dim=64, layers=8, qk_norm=True, norm="layernorm", mlp_bias=True, qkv_bias=True, positions="learned"
    )
    for parameter in parameters(spec):
        values = initial_values(spec, parameter.name, parameter.shape, seed=0)
        if parameter.name.endswith("norm.weight"):
            assert (values == 1).all()
        elif parameter.name.endswith("bias"):
            assert (values == 0).all()
        else:
            residual = parameter.name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = spec.init_std / 4 if residual else spec.init_std
            assert values.std().item() == pytest.approx(std, rel=0.12), parameter.name


def test_a_whole_model_is_filled_by_name_and_tied_weights_once():
    spec = small(tied=True)
    model = built(spec)
    initialise(model, spec, seed=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(
            parameter, initial_values(spec, name, parameter.shape, seed=3, dtype=torch.float64)
        )
    assert torch.equal(model.head.output.weight, model.embedding.tokens.weight)


def test_a_slab_outside_of_its_parameter_is_refused():
    with pytest.raises(ValueError, match="reaches outside"):
        initial_values(SPEC, "a.weight", (4, 4), 0, (3, 0), (2, 4))
    with pytest.raises(ValueError, match="do not fit"):
        initial_values(SPEC, "a.weight", (4, 4), 0, (3,), (1,))
