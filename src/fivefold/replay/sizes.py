"""How large one rank's tensors are for one micro-batch, and which operations make them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np

from fivefold.axes import fp8
from fivefold.axes.context import sent_kv_heads
from fivefold.ledger.fp8 import HEAD, gathered
from fivefold.ledger.numbers import Rows, divided_up
from fivefold.ledger.setup import Setup
from fivefold.ledger.work import BLOCKS_AT_ONCE
from fivefold.models.spec import QUERY_TILE
from fivefold.replay.operations import WIDE

SHAPES = ("micro_batch", "cp", "tp", "ep")
"""Of a layout's numbers, those that the shapes of one rank's tensors are made of."""
MOST_STEPS = 2 * BLOCKS_AT_ONCE
"""The most steps of a ring that are replayed: with the last of these results are put together a second time,
and never are there more tensors later on."""


class Sizes:
    """In elements; and conditions, which decide what operations a layout runs.

    Of many layouts both are arrays, until `alike` puts those together that run the same operations.
    """

    def __init__(self, setup: Setup):
        spec = setup.spec
        rows: Any = setup.micro_batch
        cp: Any = setup.cp
        tp: Any = setup.tp
        ep: Any = setup.ep
        kv_heads: Any = setup.kv_heads
        self.spec, self.tp, self.cp, self.cp_kind = spec, tp, cp, setup.cp_kind
        self.width = setup.precision.compute_bytes
        self.wide = max(WIDE, self.width)
        self.rows = rows
        self.tokens = setup.tokens
        self.whole = self.tokens * spec.dim
        self.stream = self.tokens // tp * spec.dim if setup.sequence_parallel else self.whole
        self.heads, self.kv_heads = spec.heads // tp, kv_heads
        self.query_rows = self.tokens * self.heads
        self.query_tile = self.query_rows * min(QUERY_TILE, setup.seq_len)  # the scores of one tile
        self.query = self.query_rows * spec.head_dim
        self.kv = self.tokens * self.kv_heads * spec.head_dim
        self.table = setup.seq_len // cp * spec.head_dim // 2
        self.vocabulary = divided_up(spec.vocab_size, tp)
        self.in_chunks = setup.loss_chunk > 0
        self.chunk = np.minimum(self.tokens, setup.loss_chunk)  # tokens of the loss's first, the largest
        self.experts, self.per_token = spec.experts or 0, spec.experts_per_token or 0
        self.held_experts = self.experts // ep
        self.rowwise, self.gathers_blocks = setup.fp8 == "rowwise", setup.gathers_in_8_bits
        self.gathers_head = gathered(setup, HEAD)
        for item in fp8.layers(setup) if setup.fp8 != "none" else ():
            setattr(self, _flag(item.what), item.fp8)

        self.several_tp: bool = tp > 1
        self.several_ep: bool = ep > 1
        self.sequence_parallel = self.several_tp & setup.sequence_parallel
        # Messages of the stream want a rank's tokens together: [S, B, dim]. One row has no other order.
        self.turned_stream: bool = self.sequence_parallel & (rows > 1)
        # Rotating puts each head's tokens side by side; with one head there is only one order.
        rotates = spec.positions == "rope"
        self.turned_query: bool = rotates & (self.heads > 1)
        self.turned_key: bool = rotates & (kv_heads > 1)
        self.whole_kv: bool = self.several_tp & (spec.kv_heads % tp != 0)
        self.cp_steps: int = np.minimum(cp, {"": 1, "ring": MOST_STEPS}.get(setup.cp_kind, 2))
        self.several_cp = self.cp_steps > 1
        self.repeats_kv: bool = self.several_cp & (self.heads != self.kv_heads)
        if setup.cp_kind == "ulysses":
            sent: Any = sent_kv_heads(self.kv_heads, cp)
            several_heads = self.heads != cp
            self.ulysses_kv = sent * self.tokens * spec.head_dim
            self.ulysses_repeats: bool = self.several_cp & (sent > self.kv_heads)
            self.several_ulysses_heads: bool = self.several_cp & several_heads
            self.several_ulysses_kv_heads: bool = self.several_cp & (sent != cp)
            self.several_rows: bool = self.several_cp & (rows > 1)

    def in_fp8(self, what: str) -> bool:
        """Whether a linear layer computes in 8 bits."""
        return bool(getattr(self, _flag(what), False))

    def alike(self) -> Iterator[tuple[Rows, Sizes]]:
        """Layouts in arrays, those together that run the same operations: their places, and their sizes."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        decisive = {name for name, value in arrays.items() if value.dtype == bool} | {"cp_steps"}
        conditions = np.stack([arrays[name] for name in decisive])
        _, firsts, groups = np.unique(conditions, axis=1, return_index=True, return_inverse=True)
        for group, first in enumerate(firsts):
            places = np.flatnonzero(groups == group)
            some = copy(self)
            for name, value in arrays.items():
                setattr(some, name, value[first] if name in decisive else value[places])
            yield places, some


def _flag(what: str) -> str:
    """An attribute by itself, as decisions are."""
    return f"fp8_{what.replace('.', '_')}"
