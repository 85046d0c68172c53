"""How other programs cut a model into the stages of a pipeline; most agree where layers divide evenly."""

from collections import Counter

from fivefold.ledger.setup import Setup
from fivefold.planner.placement import Cut, Load, with_ends


def evenly(setup: Setup, stages: int) -> list[Load]:
    """As Megatron does: as many layers in each stage.

    Where that makes the count divide, embedding and head count as a layer each, as in BLOOM and Llama 3 405B.
    Where nothing does, stages are full until the layers run out, and the last have fewer: so NVIDIA's recipes
    cut the 61 layers of DeepSeek-V3, and so DeepSpeed's `partition_balanced` did in BLOOM's days. What others
    do then is not known; no published run of theirs needs it. Every stage has a layer if there are enough of
    them, else the first ones have none.
    """
    layers = setup.spec.layers
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return with_ends([each - 1, *[each] * (stages - 2), each - 1])
    each, left, counts = -(-layers // stages), layers, []
    for behind in reversed(range(stages)):
        counts.append(max(0, min(each, left - behind)))
        left -= counts[-1]
    return with_ends(counts)


def later_longer(setup: Setup, stages: int) -> list[Load]:
    """As InternEvo does (its `partition_uniform`): what does not divide goes to the last stages."""
    short, longer = divmod(setup.spec.layers, stages)
    return with_ends([short + (stage >= stages - longer) for stage in range(stages)])


def by_cost(setup: Setup, stages: int) -> list[Load]:
    """As nanotron does (its models/base.py): a stage takes parts until their costs exceed its share.

    The embedding, the last norm, the cast of the logits and the loss cost nothing. A stage behind the loss
    may be left with nothing at all.
    """
    spec = setup.spec
    layer = 4 * spec.heads * spec.head_dim * spec.dim + 3 * spec.ffn * spec.dim
    parts = [("embedding", 0), *[("layers", layer)] * spec.layers, ("norm", 0)]
    parts += [("head", spec.vocab_size * spec.dim), ("loss", 0), ("loss", 0)]  # the cast, then the loss
    total = sum(cost for _, cost in parts)
    held = [Counter[str]() for _ in range(stages)]
    stage = done = 0
    for part, cost in parts:
        held[stage][part] += 1
        done += cost
        stage += done > total * ((stage + 1) / stages)
    return [Load(has["layers"], has["embedding"], has["head"], min(1, has["loss"])) for has in held]


CUTS: dict[str, Cut] = {cut.__name__: cut for cut in (evenly, later_longer, by_cost)}
"""By the names that `stacks.toml` gives them."""
