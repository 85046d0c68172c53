"""The expert axis: `ep` ranks hold different experts of every layer, and exchange tokens.

The ranks are those of dp_shard x cp, neighbours first, each with tokens of its own.

    tokens sorted by expert --all-to-all--> this rank's experts --all-to-all--> back, weighted, added

So an expert's gradient is already summed over the `ep` ranks after backward. What is left to sum are the
`EXPERT_SHARDS` and dp_replicate ranks that hold the same experts, and ZeRO shards over the former alone.
Under tp each expert's matrices are split too, and every tp rank sends the same tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from fivefold.axes.rules import rule
from fivefold.ledger.ledger import Message
from fivefold.ledger.numbers import clipped, divided_up, divisors
from fivefold.ledger.setup import Number, Setup

COUNT_BYTES = 8


def is_expert(name: str) -> bool:
    """Whether `ep` ranks split this parameter, along its first dimension: one entry for each expert."""
    return ".mlp.experts." in name


def _fitting(setup: Setup) -> str:
    """The degrees that divide both the experts and the ranks."""
    common = math.gcd(setup.spec.experts or 0, int(setup.shard_ranks))
    return " or ".join(map(str, divisors(common)))


@rule("layout.ep", lambda setup: (setup.spec.experts or 0) % setup.ep == 0)
def _experts(setup: Setup) -> tuple[str, str]:
    experts, ep = setup.spec.experts or 0, setup.ep
    hint = f"Use layout.ep = {_fitting(setup)}, or model.experts = {divided_up(experts, ep) * ep}."
    return f"{ep} ranks cannot share model.experts = {experts} evenly", hint


@rule("layout.ep", lambda setup: setup.shard_ranks % setup.ep == 0)
def _ranks(setup: Setup) -> tuple[str, str]:
    ep, cp = setup.ep, setup.cp
    degrees = f"layout.dp_shard x layout.cp = {setup.dp_shard} x {cp}"
    hint = f"Use layout.ep = {_fitting(setup)}"
    if ep % cp == 0:
        hint += f", or layout.dp_shard = {divided_up(setup.shard_ranks, ep) * ep // cp}"
    return f"{ep} does not divide {degrees}, among whose ranks experts are spread", f"{hint}."


# FSDP gathers experts in the middle of a block, and not each time its forward runs; torch's selective
# recomputation takes that for a different program.
@rule("training.recompute", lambda setup: setup.zero == 0 or setup.recompute != "selective" or setup.ep == 1)
def _recomputation(setup: Setup) -> tuple[str, str]:
    message = f"'selective' with layout.ep = {setup.ep} and layout.zero = {setup.zero}"
    otherwise = "" if setup.dp_shard > 1 else "; or layout.zero = 0"
    return message, f"Use full, every-C, sqrt or none{otherwise}."


RULES = (_experts, _ranks, _recomputation)


def shard_dimension(shape: Sequence[int], ranks: int) -> int:
    """Along which dimension `ranks` ranks shard an expert parameter, of which this `shape` is left to them.

    By experts where these divide; else each expert by rows; where neither divides, by experts, unevenly.
    """
    return 1 if shape[0] % ranks and shape[1] % ranks == 0 else 0


def block_messages(setup: Setup, coming: Number | None = None, balanced: bool = True) -> list[Message]:
    """One block, one micro-batch: tokens travel to their experts and back.

    coming  how many tokens the experts of this rank get (a token counts once for each of them it is sent to);
            by default as many as come to the first rank when tokens are dealt to the experts in turn
    balanced  a term of the loss keeps experts evenly used: it counts over whole sequences
    """
    spec = setup.spec
    if spec.experts is None or spec.experts_per_token is None:
        return []
    row = spec.dim * setup.precision.compute_bytes
    leaving = setup.tokens * spec.experts_per_token * row
    arriving = (dealt(setup) if coming is None else coming) * row
    payloads = (spec.experts * COUNT_BYTES, leaving, arriving)
    forward = [Message("all_to_all", payload, "ep", setup.ep, 1, "forward") for payload in payloads]
    # Even what a segment's last layer gets back is needed again, for the gradient of its router.
    again = forward if setup.recomputes_layers else []
    backward = [replace(message, phase="backward") for message in (*again, *forward[1:])]
    counts = setup.micro_batch * spec.experts * COUNT_BYTES
    balance = Message("all_reduce", counts, "cp", setup.cp, int(balanced), "backward")
    return [*forward, *backward, balance]


def dealt(setup: Setup, here: Number = 0) -> Number:
    """How many tokens come to the rank at `here` of dp_shard x cp when they are dealt to experts in turn."""
    experts, chosen, cp, ep = setup.spec.experts, setup.spec.experts_per_token, setup.cp, setup.ep
    if experts is None or chosen is None:
        return 0
    each, mine = experts // ep, here % ep

    def turns(tokens: Number) -> Number:
        """How many turns of the first `tokens` of a sequence fall to this rank's experts."""
        rounds, rest = tokens * chosen // experts, tokens * chosen % experts
        return rounds * each + clipped(rest - mine * each, 0, each)

    def of_first(senders: Number) -> Number:
        """The turns of the first `senders` ranks' tokens: whole sequences, and part of the next."""
        sequences, rest = senders // cp, senders % cp
        if setup.cp_kind == "ulysses":
            part = turns(rest * (setup.seq_len // cp))
        else:  # in zigzag two half chunks each, from both ends of the sequence
            half = setup.seq_len // (2 * cp)
            part = turns(rest * half) + turns(setup.seq_len) - turns(setup.seq_len - rest * half)
        return sequences * turns(setup.seq_len) + part

    first = here - mine
    return (of_first(first + ep) - of_first(first)) * setup.micro_batch
