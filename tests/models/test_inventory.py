import torch
from hypothesis import given, settings

from fivefold.models.decoder import Decoder
from fivefold.models.inventory import parameter_count, parameters
from fivefold.models.presets import PRESETS
from tests.models.zoo import small, small_specs


@settings(max_examples=60, deadline=None)
@given(small_specs())
def test_the_inventory_is_the_models_own(spec):
    with torch.device("meta"):
        model = Decoder(spec)
    assert [(p.name, p.shape) for p in parameters(spec)] == [
        (name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
    ]
    assert not list(model.buffers())


@given(small_specs(experts=True))
def test_the_count_is_the_inventorys(spec):
    assert parameter_count(spec) == sum(parameter.count for parameter in parameters(spec))


def test_the_inventory_of_a_released_model_is_the_models_own():
    for name in ("tiny", "gpt2", "llama3.2-1b", "palm-540b"):
        with torch.device("meta"):
            model = Decoder(PRESETS[name])
        assert [(p.name, p.shape) for p in parameters(PRESETS[name])] == [
            (name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
        ]


def test_parts_are_where_a_parameter_lives():
    found = {
        parameter.name: parameter.part for parameter in parameters(small(layers=12, positions="learned"))
    }
    assert found["embedding.positions.weight"] == "embedding"
    assert found["blocks.11.mlp.down.weight"] == "blocks.11"
    assert found["head.output.weight"] == "head"


def test_experts_are_stacked():
    spec = small(experts=5, experts_per_token=2, mlp_bias=True)
    found = {parameter.name: parameter.shape for parameter in parameters(spec)}
    assert found["blocks.1.mlp.router.weight"] == (5, 24)
    assert found["blocks.1.mlp.experts.gate.weight"] == (5, 40, 24)
    assert found["blocks.1.mlp.experts.down.weight"] == (5, 24, 40)
    assert found["blocks.1.mlp.experts.down.bias"] == (5, 24)
    assert "blocks.1.mlp.up.weight" not in found
