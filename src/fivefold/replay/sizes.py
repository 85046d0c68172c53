"""How large one rank's tensors are for one micro-batch, and which operations make them."""

from typing import Any

import numpy as np

from fivefold.axes.context import sent_kv_heads
from fivefold.ledger.numbers import divided_up
from fivefold.ledger.setup import Number, Setup
from fivefold.models.spec import ModelSpec
from fivefold.replay.operations import WIDE

MOST_STEPS = 4
"""The most steps of a ring that are replayed: later ones have the same tensors as the last of these."""


class Sizes:
    """In elements. Layouts in arrays must all run the same operations."""

    def __init__(self, setup: Setup):
        spec = setup.spec
        self.spec: ModelSpec = spec
        self.width = setup.precision.compute_bytes
        self.wide = max(WIDE, self.width)
        self.rows: Number = setup.micro_batch
        self.tokens: Number = setup.tokens
        self.tp, self.cp, self.ep = setup.tp, setup.cp, setup.ep
        self.several_tp = _all(setup.tp > 1)
        self.sequence_parallel = self.several_tp and setup.sequence_parallel
        self.one_row = _all(setup.micro_batch == 1)
        self.stream_tokens = self.tokens // setup.tp if self.sequence_parallel else self.tokens
        self.stream = self.stream_tokens * spec.dim
        self.whole = self.tokens * spec.dim
        self.heads = spec.heads // setup.tp
        self.kv_heads = setup.kv_heads
        self.query = self.tokens * self.heads * spec.head_dim
        self.kv = self.tokens * self.kv_heads * spec.head_dim
        self.table = setup.seq_len // setup.cp * spec.head_dim // 2
        self.vocabulary = divided_up(spec.vocab_size, setup.tp)
        self.one_head = _all(self.heads == 1)
        self.one_kv_head = _all(self.kv_heads == 1)
        self.whole_kv = self.several_tp and _all(spec.kv_heads % setup.tp != 0)
        self.several_cp, self.cp_kind = _all(setup.cp > 1), setup.cp_kind
        self.cp_steps = min(int(np.min(setup.cp)), MOST_STEPS)
        self.query_rows = self.tokens * self.heads
        self.repeats_kv = not _all(self.heads == self.kv_heads)
        if self.several_cp and setup.cp_kind == "ulysses":
            sent = sent_kv_heads(self.kv_heads, setup.cp)
            self.ulysses_repeats = _all(sent > self.kv_heads)
            self.ulysses_kv = sent * self.tokens * spec.head_dim
            self.one_ulysses_head = _all(self.heads == setup.cp)
            self.one_ulysses_kv_head = _all(sent == setup.cp)
        self.several_ep = _all(setup.ep > 1)
        self.experts, self.per_token = spec.experts or 0, spec.experts_per_token or 0
        self.held_experts = self.experts // setup.ep


def _all(condition: Any) -> bool:
    """Whether something is so for every layout; they must not differ in it."""
    every = bool(np.all(condition))
    if every != bool(np.any(condition)):
        raise ValueError("these layouts do not run the same operations: see replay.activations")
    return every
