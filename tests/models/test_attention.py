import math

import pytest
import torch
from torch import Tensor

from fivefold.models.attention import AttentionCore, Context, attention_mask
from fivefold.models.rope import rope_tables, rotate
from fivefold.models.spec import RopeScaling
from tests.models.zoo import small

CPU = torch.device("cpu")


def by_hand(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attention as the formula says it, one query head at a time."""
    repeats = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        k, v = key[:, head // repeats], value[:, head // repeats]
        scores = query[:, head] @ k.transpose(1, 2) / math.sqrt(query.shape[-1])
        heads.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v)
    return torch.stack(heads, 1)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_the_core_is_the_formula_forward_and_backward(kv_heads: int, masked: bool):
    torch.manual_seed(0)
    query = torch.randn(2, 6, 33, 10, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, kv_heads, 33, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    documents = torch.randint(0, 3, (2, 33)).sort(1).values
    mask = attention_mask(33, CPU, documents, 7) if masked else None
    visible = torch.ones(33, 33, dtype=torch.bool).tril() if mask is None else mask[:, 0]
    upstream = torch.randn(2, 6, 33, 10, dtype=torch.float64)

    def run(attend) -> tuple[Tensor, ...]:
        out = attend()
        return (out, *torch.autograd.grad(out, (query, key, value), upstream))

    ours = run(lambda: AttentionCore()(query, key, value, Context(None, mask)))
    expected = run(lambda: by_hand(query, key, value, visible))
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_the_mask_by_brute_force():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 4], [7, 7, 7, 7, 7, 7, 7, 7]])
    for window in (None, 1, 3, 8, 20):
        mask = attention_mask(8, CPU, documents, window)
        assert mask is not None
        assert mask.shape == (2, 1, 8, 8)
        for row in range(2):
            for q in range(8):
                for k in range(8):
                    same_document = bool(documents[row, q] == documents[row, k])
                    near = window is None or q - k < window
                    assert mask[row, 0, q, k] == (k <= q and same_document and near)


def test_no_mask_where_plain_causal_attention_says_it_all():
    assert attention_mask(8, CPU, None, None) is None
    assert attention_mask(8, CPU, None, 8) is None
    mask = attention_mask(8, CPU, None, 7)
    assert mask is not None
    assert not mask[0, 0, 7, 0]
    assert mask[0, 0, 7, 1]


def test_rotation_leaves_only_the_distance_between_positions():
    spec = small(head_dim=16)
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(q_position: int, k_position: int) -> Tensor:
        turned = [
            rotate(x, *rope_tables(spec, torch.tensor([position]), torch.float64))
            for x, position in ((query, q_position), (key, k_position))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(5, 3), score(40, 38), rtol=1e-5, atol=1e-5)
    assert (score(5, 3) - score(5, 2)).abs() > 1e-3


def test_rotation_turns_each_pair_as_a_complex_number():
    spec = small(head_dim=8, rope_theta=100.0)
    x = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    got = rotate(x, *rope_tables(spec, torch.arange(4), torch.float64))
    for position in range(4):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            number = complex(x[0, 0, position, pair], x[0, 0, position, pair + 4])
            number *= complex(math.cos(angle), math.sin(angle))
            assert complex(got[0, 0, position, pair], got[0, 0, position, pair + 4]) == pytest.approx(
                number, rel=1e-6
            )


def test_tables_of_a_piece_are_a_piece_of_the_tables():
    spec = small(head_dim=64, rope_scaling=RopeScaling(factor=8.0))
    whole = rope_tables(spec, torch.arange(4096), torch.float64)
    for start, length in ((0, 1), (17, 13), (1000, 333), (4095, 1)):
        piece = rope_tables(spec, torch.arange(start, start + length), torch.float64)
        for got, want in zip(piece, whole, strict=True):
            assert torch.equal(got, want[start : start + length])


def test_positions_of_each_sequence_broadcast_over_heads():
    spec = small()
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    cos, sin = rope_tables(spec, positions, torch.float32)
    assert cos.shape == sin.shape == (2, 1, 3, 3)
    assert torch.equal(cos[1, 0], rope_tables(spec, positions[1], torch.float32)[0])


def test_stretching_by_three_bands_of_wavelength():
    """Radians per position, read off the tables at position 1: fast pairs kept, slow ones divided."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    one = torch.tensor([1])
    plain, stretched = (
        rope_tables(small(head_dim=128, rope_theta=5e5, rope_scaling=s), one, torch.float64)[1].asin()[0]
        for s in (None, scaling)
    )
    ratio = plain / stretched
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(ratio[wavelength < 8192 / 4], torch.ones_like(ratio[wavelength < 8192 / 4]))
    torch.testing.assert_close(ratio[wavelength > 8192], torch.full_like(ratio[wavelength > 8192], 8.0))
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert between.numel() > 2
    assert ((between > 1) & (between < 8)).all()
    assert (between.diff() > 0).all()
