from typing import Any

import pytest
from hypothesis import given
from pydantic import ValidationError

from fivefold.models.spec import ModelSpec, RopeScaling
from tests.models.zoo import SMALL, small, small_specs


def test_fields_left_out_follow_the_others():
    fields = {key: value for key, value in SMALL.items() if key != "kv_heads"}
    spec = ModelSpec(**fields)
    assert (spec.kv_heads, spec.head_dim, spec.norm_bias) == (4, 6, False)
    assert ModelSpec(**fields, norm="layernorm").norm_bias is True
    assert ModelSpec(**fields | {"kv_heads": None, "head_dim": None}) == spec


def test_derived_fields_follow_a_later_override_and_given_ones_do_not():
    stated = small().model_dump(exclude_unset=True)
    assert ModelSpec(**{**stated, "dim": 48}).head_dim == 12
    assert ModelSpec(**{**stated, "heads": 12}).kv_heads == 2


@given(small_specs(experts=True))
def test_a_dumped_spec_reads_back_as_itself(spec):
    assert ModelSpec(**spec.model_dump()) == spec
    assert ModelSpec(**spec.model_dump(exclude_unset=True)) == spec
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_heads": 3}, "kv_heads = 3 does not divide heads = 4; choose kv_heads from 1, 2, 4"),
        ({"heads": 5, "kv_heads": 5}, "dim = 24 is not a multiple of heads = 5"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        ({"positions": "learned", "rope_scaling": RopeScaling(factor=2.0)}, "rope_scaling needs"),
        ({"positions": "learned", "rope_theta": 5e5}, "rope_theta needs"),
        ({"norm_bias": True}, "norm_bias = true needs"),
        ({"experts": 4}, "go together"),
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token = 5 is more than experts = 4"),
        ({"dim": 0}, "greater than or equal to 1"),
        ({"dim": "24"}, "valid integer"),
        ({"dim": 24.0}, "valid integer"),
        ({"layers": True}, "valid integer"),
        ({"norm_eps": 0.0}, "greater than 0"),
        ({"init_std": float("nan")}, "finite number"),
        ({"rope_theta": float("inf")}, "finite number"),
        ({"activation": "swish"}, "'swiglu', 'geglu-tanh', 'gelu', 'gelu-tanh' or 'relu'"),
        ({"rope_scaling": {"factor": 0.5}}, "greater than or equal to 1"),
        ({"rope_scaling": {"factor": 2.0, "low_freq_factor": 4.0}}, "must be above"),
        ({"widht": 3}, "Extra inputs"),
        ({"widht": None}, "Extra inputs"),
        ({"sliding_window": 0}, "greater than or equal to 1"),
        ({"full_attention_every": 2}, "full_attention_every = 2 needs a window"),
        ({"full_attention_every": 1, "sliding_window": 4}, "greater than or equal to 2"),
        ({"norm": "layernorm", "norm_unit_offset": True}, 'norm_unit_offset = true needs norm = "rmsnorm"'),
        ({"attention_softcap": 0.0}, "greater than 0"),
        ({"final_softcap": float("inf")}, "finite number"),
        ({"attention_scale_dim": 2.5}, "valid integer"),
    ],
)
def test_impossible_specs_are_refused(fields: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said.replace("(", r"\(")):
        small(**fields)


def test_every_field_is_described():
    for model in (ModelSpec, RopeScaling):
        for name, field in model.model_fields.items():
            assert field.description, name
