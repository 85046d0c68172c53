"""Letting the linear layers of a model compute in 8 bits, and finding the scales of their weights."""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.axes import fp8
from fivefold.axes.runtime.fp8_gather import gather_in_8_bits
from fivefold.axes.runtime.fp8_grouped import GroupedProduct
from fivefold.axes.runtime.fp8_numbers import E4M3, scale_for
from fivefold.axes.runtime.fp8_product import Fp8Product, Input
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.tensor_layers import LocalLayer
from fivefold.config import Job
from fivefold.ledger.fp8 import HEAD, gathered, input_of, is_of_experts
from fivefold.ledger.setup import Setup
from fivefold.models.decoder import Decoder
from fivefold.models.inventory import EMBEDDING


def split(model: Decoder, mesh: Mesh, job: Job) -> Decoder:
    """Give the layers that take part another product, in place; the tensor axis must have had its turn."""
    setup = Setup.of(job)
    if setup.fp8 == "none":
        return model
    taking = fp8.in_fp8(setup)
    for layer, block in model.blocks.items():
        if setup.of_layer(int(layer)).fp8 != "none":
            names = [what for what in taking if what != HEAD]
            _replace(block, names, f"blocks.{layer}.", mesh, setup)
    if model.head is not None and HEAD in taking:
        _replace(model.head, ["output"], "head.", mesh, setup)
    return model


def _replace(part: nn.Module, names: Sequence[str], prefix: str, mesh: Mesh, setup: Setup) -> None:
    read = [input_of(name) for name in names]
    inputs = {name: Input(read.count(name)) for name in read}
    group = mesh.group("tp")
    for name in names:
        cut = (group, None) if fp8.splits_inputs(name) else (None, group)
        kind = GroupedProduct if is_of_experts(name) else Fp8Product
        product = kind(prefix + name, setup.fp8 == "rowwise", inputs[input_of(name)], *cut)
        layer: Any = part.get_submodule(name)
        if gathered(setup, HEAD if f"{prefix}{name}" == HEAD else name):
            _stay_out_of_graphs(layer, product)
        if isinstance(layer, LocalLayer):
            layer.linear = product
        else:
            layer.product = product
            # A method: compilers take any other function of a layer's own for one that no other block has.
            layer.forward = MethodType(_multiplied, layer)


def _stay_out_of_graphs(layer: Any, product: nn.Module) -> None:
    """A compiled graph would want a gathered weight's gradient to be such a weight, too."""
    product.forward = torch.compiler.disable(product.forward)  # type: ignore[method-assign]
    if isinstance(layer, LocalLayer):
        layer.used_parts = torch.compiler.disable(layer.used_parts)  # type: ignore[method-assign]


def _multiplied(layer: Any, x: Tensor, *counts: Tensor) -> Tensor:
    """As `nn.Linear`'s forward: x [..., in] -> [..., out]; as `StackedLinear`'s, with `counts`."""
    result: Tensor = layer.product(x, layer.weight, layer.bias, *counts)
    return result


def products(parts: Sequence[nn.Module]) -> list[Fp8Product | GroupedProduct]:
    """The products in 8 bits of this rank's stages, in forward order."""
    every = [module for part in parts for module in part.modules()]
    return [module for module in every if isinstance(module, Fp8Product | GroupedProduct)]


def forget(parts: Sequence[nn.Module]) -> None:
    """Let products begin anew to say what was not finite."""
    for product in products(parts):
        product.spoilt.zero_()


def first_non_finite(parts: Sequence[nn.Module], gradients: Mapping[str, Tensor]) -> str | None:
    """Where numbers were not finite first, as far as products saw; what they saw is then forgotten.

    gradients  of this rank's weights, by their names. If nothing was seen in forward they tell: backward goes
               from the last product to the first, so it came up at the last one whose weight's is spoilt.
               (A weight that is an embedding as well has gradients from both ends, and tells nothing.)
    """
    every = products(parts)
    for product in every:
        weight, given = product.spoilt.tolist()
        if weight or given:
            forget(parts)
            return f"the {'weight' if weight else 'input'} of {product.name}"
    for product in reversed(every):
        found = gradients.get(f"{product.name}.weight")
        if found is not None and found.isnan().any():
            return f"the output gradient of {product.name}"
    return None


class WeightScales:
    """One scale for each weight of the model, found from the masters of all ranks that keep parts of it.

    ZeRO gathers weights by them, in 8 bits.

    names    of this rank's masters
    masters  float32, which layers see rounded to bfloat16; or so rounded, which has the same scales
    """

    def __init__(
        self, job: Job, mesh: Mesh, parts: Sequence[nn.Module], names: Sequence[str], masters: list[Tensor]
    ):
        every = fp8.weights(Setup.of(job))
        place = {name: index for index, name in enumerate(every)}
        self.mine = [(place[name], m) for name, m in zip(names, masters, strict=True) if name in place]
        self.ranks, self.group = mesh.layout.ranks, mesh.everyone
        self.scales = torch.ones(len(every), device=masters[0].device)
        gathered = set(fp8.gathered_weights(Setup.of(job)))
        for name, parameter in chain.from_iterable(part.named_parameters() for part in parts):
            if name in gathered:
                gather_in_8_bits(cast(DTensor, parameter), self.scales[place[name]])
        for product in products(parts):
            name = f"{product.name}.weight"
            name = EMBEDDING if name == f"{HEAD}.weight" and job.spec.tied else name
            product.weight_scale = self.scales[place[name]]

    @torch.no_grad()
    def find(self) -> None:
        """Once the masters have changed; all ranks together."""
        amax = torch.zeros_like(self.scales)
        held = [(index, master) for index, master in self.mine if master.numel()]
        if held:
            found = torch.stack([master.abs().amax().float() for _, master in held])
            index = torch.tensor([index for index, _ in held], device=amax.device)
            amax.scatter_reduce_(0, index, found, "amax")
        amax = amax.bfloat16().float()
        if self.ranks > 1:
            # As integers, whose order is the same: no backend says what is the larger of a number and NaN.
            dist.all_reduce(amax.view(torch.int32), dist.ReduceOp.MAX, group=self.group)
        self.scales.copy_(scale_for(amax, E4M3))
