"""Linear layers in 8 bits: the rule that some take part, which ones, and the messages that make scales equal.

Scales of whole weights are equal under every axis: after each update ranks tell each other the largest number
of each (of experts' weights: of the whole stack). Those of inputs and output gradients are equal on all tp
ranks: where each has some of the features, they tell each other the largest (of all tokens, or of each). Data
and context ranks scale their own tokens, ep ranks those that came to their experts.
"""

from collections.abc import Iterator
from itertools import product

from fivefold.axes.expert import dealt
from fivefold.axes.layout import EVERYONE
from fivefold.axes.rules import rule
from fivefold.axes.tensor import SPLIT_BY_INPUT
from fivefold.ledger.fp8 import HEAD, gathered, is_of_experts, reason
from fivefold.ledger.ledger import Message, Phase
from fivefold.ledger.numbers import choose
from fivefold.ledger.setup import Condition, Number, Setup
from fivefold.ledger.work import Work, block_work, head_work
from fivefold.models.inventory import EMBEDDING

SCALE = 4
"""Bytes of a largest number: a float32."""


def layers(setup: Setup) -> list[Work]:
    """The linear layers of one block and the head, as one rank computes them; `Work.fp8`: who takes part."""
    work = [*block_work(setup), *head_work(setup)]
    return [item for item in work if item.kind == "matmul" and item.phase == "forward"]


def in_fp8(setup: Setup) -> list[str]:
    """Which layers of a block that takes part, and the head, compute in 8 bits; of one layout."""
    return [item.what for item in layers(setup) if item.fp8]


def weights(setup: Setup) -> list[str]:
    """The parameters of the whole model that are multiplied in 8 bits, in order; of one layout."""
    return _weights_of(setup, in_fp8(setup))


def gathered_weights(setup: Setup) -> list[str]:
    """Of these, those that ZeRO gathers in 8 bits."""
    if not setup.gathers_in_8_bits:
        return []
    return _weights_of(setup, [what for what in in_fp8(setup) if gathered(setup, what)])


def _weights_of(setup: Setup, taking: list[str]) -> list[str]:
    blocks = [n for n in range(setup.spec.layers) if setup.of_layer(n).fp8 != "none"]
    names = [f"blocks.{n}.{what}.weight" for n in blocks for what in taking if what != HEAD]
    if HEAD in taking:
        names.append(EMBEDDING if setup.spec.tied else f"{HEAD}.weight")
    return names


def gathered_of_parts(setup: Setup) -> dict[str, Condition]:
    """The parameters of the first block and of the head of which some layouts gather in 8 bits, and which do.

    Of one layout or of many; all blocks are taken to take part.
    """
    work = layers(setup) if setup.gathers_in_8_bits else ()
    return {
        f"{HEAD}.weight" if item.what == HEAD else f"blocks.0.{item.what}.weight": item.fp8
        for item in work
        if gathered(setup, item.what)
    }


def splits_inputs(what: str) -> bool:
    """Whether tp ranks have some inputs each of this layer; otherwise they have some outputs each."""
    return f".{what}".endswith(SPLIT_BY_INPUT)


def _some(setup: Setup) -> Condition:
    found: Condition = False
    for item in layers(setup) if setup.fp8 != "none" else ():
        found = found | item.fp8
    return found


@rule("training.fp8", lambda setup: setup.fp8 == "none" or _some(setup))
def _none(setup: Setup) -> tuple[str, str]:
    """A setting that changes nothing is not taken."""
    why = [(item.what, _why(setup, item)) for item in layers(setup)]
    told = ", ".join(f"{what} ({reason})" for what, reason in why)
    message = f"'{setup.fp8}', but no layer can take part on these ranks: {told}"
    small = any(reason.startswith("too small") for _, reason in why)
    hint = "Set training.fp8_small = true to take part all the same, or leave" if small else "Leave"
    return message, f"{hint} training.fp8 out."


RULES = (_none,)


def _why(setup: Setup, item: Work) -> str:
    return reason(setup, item.what, int(item.inner), int(item.columns))


def told(setup: Setup) -> str:
    """Which layers compute in 8 bits and which do not, in a line; of one layout."""
    found = layers(setup)
    inside = [n for n in range(setup.spec.layers) if setup.of_layer(n).fp8 != "none"]
    blocks = _blocks(_numbers(inside[0], inside[-1] + 1))
    taking = [item.what for item in found if item.fp8 and item.what != HEAD]
    words = [f"{', '.join(taking)} of {blocks}"] if taking else []
    words += [HEAD] if any(item.fp8 and item.what == HEAD for item in found) else []
    left: dict[str, list[str]] = {}
    for item in found:
        if not item.fp8:
            left.setdefault(_why(setup, item), []).append(item.what)
    apart = [f"{', '.join(names)} ({reason})" for reason, names in left.items()]
    ends = [_numbers(0, inside[0]), _numbers(inside[-1] + 1, setup.spec.layers)]
    apart += [_blocks(", ".join(filter(None, ends)))] if any(ends) else []
    return f"{setup.fp8}: {'; '.join(words)}" + (f". In bf16: {'; '.join(apart)}" if apart else "")


def _blocks(numbers: str) -> str:
    return f"{'block' if numbers.isdecimal() else 'blocks'} {numbers}"


def _numbers(start: int, end: int) -> str:
    """`3-7`, `3`, or nothing."""
    return "" if start == end else f"{start}" if start + 1 == end else f"{start}-{end - 1}"


def block_messages(setup: Setup, coming: Number | None = None) -> list[Message]:
    """One block, one micro-batch: what tp ranks tell each other of inputs, gradients and weights.

    coming  how many tokens the experts of this rank get, as in `expert.block_messages`
    """
    return [*_messages(setup, block_work(setup), dealt(setup) if coming is None else coming)]


def head_messages(setup: Setup) -> list[Message]:
    return [*_messages(setup, head_work(setup))]


def _messages(setup: Setup, work: list[Work], coming: Number = 0) -> Iterator[Message]:
    """Rowwise, backward needs columns of weights whose outputs are cut, and forward rows of the others."""
    if setup.fp8 == "none":
        return
    rowwise, again = setup.fp8 == "rowwise", 1 * setup.recomputes_layers
    for item in work:
        if item.kind != "matmul" or item.phase != "forward":
            continue
        of_inputs = splits_inputs(item.what)
        # Where no token comes, a row of zeros stands in for them.
        rows = choose(coming == 0, 1, coming) if is_of_experts(item.what) else setup.tokens
        of_weight = item.batch * (item.columns if of_inputs else item.inner)
        numbers = [rows, of_weight] if rowwise else [1]
        counts: dict[Phase, int] = {"forward": 1, "backward": again} if of_inputs else {"backward": 1}
        for (phase, count), number in product(counts.items(), numbers):
            yield Message("all_reduce", SCALE * number, "tp", setup.tp, count * (1 * item.fp8), phase)


def step_messages(setup: Setup) -> Iterator[Message]:
    """After an update: the largest number of every weight that is scaled as a whole."""
    if setup.fp8 == "tensorwise":
        yield Message("all_reduce", SCALE * count(setup), EVERYONE, setup.ranks, 1, "optimizer")


def count(setup: Setup) -> Number:
    """How many weights are scaled; of one layout or of many."""
    blocks = sum(setup.of_layer(layer).fp8 != "none" for layer in range(setup.spec.layers))
    found: Number = 0
    for item in layers(setup):
        found = found + (1 if item.what == HEAD else blocks) * (1 * item.fp8)
    return found
