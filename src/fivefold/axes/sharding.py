"""What FSDP gathers, reduces and keeps on one rank in the course of a step: the books of ZeRO 1 to 3."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.axes import expert, pipeline
from fivefold.axes.layout import EXPERT_SHARDS, Layout, Place
from fivefold.axes.pieces import EMBEDDING, Piece, pieces, shard_rows
from fivefold.axes.schedules import actions
from fivefold.ledger.precision import precision_named
from fivefold.ledger.recompute import segment_length
from fivefold.ledger.shelf import Shelf
from fivefold.models.own.spec import OwnSpec

if TYPE_CHECKING:
    from fivefold.config import Job


@dataclass(frozen=True)
class Group:
    """What FSDP gathers and reduces together, over `ranks` ranks along `axes`; sizes in elements."""

    name: str
    members: list[Piece]
    ranks: int
    axes: str

    @property
    def whole(self) -> int:
        return sum(piece.count for piece in self.members)

    @property
    def shard(self) -> int:
        """What one rank keeps: of every parameter the first rank's rows, so that all keep equally much."""
        return sum(_shard_size(piece, self.ranks, 0) for piece in self.members)

    @property
    def padded(self) -> int:
        return self.shard * self.ranks


def groups(job: Job, mine: list[Piece]) -> dict[str, list[Piece]]:
    """The parameters that FSDP gathers and reduces together, in forward order.

    Where one rank uses a tied embedding first and last, embedding and head are one group, called "root".
    Experts that are spread over ranks are a group of their own within their block.
    """
    ends_together = job.spec.tied and not any(piece.shared for piece in mine)
    found: dict[str, list[Piece]] = {}
    for piece in mine:
        part = "root" if ends_together and piece.part in ("embedding", "head") else piece.part
        if piece.expert:
            part += EXPERTS
        found.setdefault(part, []).append(piece)
    return found


EXPERTS = ".mlp.experts"


def sharded_groups(job: Job, place: Place) -> list[Group]:
    """The groups of the rank at `place`."""
    layout = Layout.of(job)
    found = []
    for name, members in groups(job, pieces(job, place)).items():
        if members[0].expert:
            found.append(Group(name, members, layout.shard_ranks // layout.ep, EXPERT_SHARDS))
        else:
            found.append(Group(name, members, layout.shard_ranks, layout.shard_axes))
    return found


def shard_elements(job: Job, place: Place) -> int:
    """How many elements of FSDP's shards the rank at `place` keeps, padding included."""
    return sum(group.shard for group in sharded_groups(job, place))


def shard_count(piece: Piece, layout: Layout, place: Place) -> int:
    """How many elements of a piece the rank at `place` updates."""
    if layout.zero == 0:
        return piece.count
    ranks, rank = layout.shard_ranks, place.dp_shard * layout.cp + place.cp
    if piece.expert:
        ranks, rank = ranks // layout.ep, rank // layout.ep
    return _shard_size(piece, ranks, rank)


def _shard_size(piece: Piece, ranks: int, rank: int) -> int:
    """How many elements one of `ranks` ranks keeps of a piece."""
    dimension = expert.shard_dimension(piece.shape, ranks) if piece.expert else 0
    rows = piece.shape[dimension]
    return piece.count // rows * shard_rows(rows, ranks, rank)


def played_step(job: Job, place: Place, reduces_always: bool) -> Play:
    """A step of the rank at `place`, played from its first forward to its last reduction."""
    from fivefold.axes.data import micro_batches

    play = Play(job, place, reduces_always)
    repeats = micro_batches(job)
    if job.layout.pp == 1:
        for repeat in range(repeats):
            play.forward(0)
            play.backward(0, last=repeat == repeats - 1)
        return play
    assert job.layout.schedule is not None
    rows = actions(job.layout.schedule, job.layout.pp, repeats, job.layout.virtual_stages or 1)
    for action in rows[place.pp]:
        if action.kind == "forward":
            play.forward(action.stage)
        elif action.kind in ("backward", "backward-input"):
            play.backward(action.stage, last=False)
        elif action.kind == "reduce":
            play.reduce(action.stage)
    return play


class Play:
    """Plays a step's gathers, frees and reductions in order, to see which weights and gradients are held.

    Only the tensors themselves are counted. The buffers that a collective copies into and out of come on
    top while it is in flight: one group's worth for a gather, and one for a reduction.

    gathers     how often each (group, phase) is gathered
    reductions  how often each group's gradients are reduced
    """

    def __init__(self, job: Job, place: Place, reduces_always: bool):
        self.weights, self.gradients = Shelf(), Shelf()
        self.gathers: Counter[tuple[str, str]] = Counter()
        self.reductions: Counter[str] = Counter()
        self.precision = precision_named(job.training.precision)
        self.recompute = job.training.recompute
        self.own = isinstance(job.spec, OwnSpec)
        self.groups = {group.name: group for group in sharded_groups(job, place)}
        self.frees = Layout.of(job).zero == 3 and not pipeline.keeps_weights(job)
        self.reduces_always = reduces_always
        cut = pipeline.stages(job)
        self.parts = {stage: cut[stage] for stage in pipeline.stages_of(job, place.pp)}

    def forward(self, stage: int) -> None:
        """A micro-batch's forward through one stage."""
        for name in self._names(stage):
            self.gather(name, "forward")
            if self.frees and name not in ("head", "root"):
                self.weights.take(name)

    def backward(self, stage: int, last: bool) -> None:
        """A micro-batch's backward through one stage; `last` where its end is the end of the step."""
        names = self._names(stage)
        if "root" in names:
            self.differentiate_tied_head()
        elif "head" in names:
            self.gather("head", "backward")
            self.differentiate("head", last)
        blocks = [name for name in names if name.startswith("blocks.") and not name.endswith(EXPERTS)]
        segment = segment_length(self.recompute, len(blocks)) or 1
        for start in reversed(range(0, len(blocks), segment)):
            again = blocks[start : start + segment]  # recomputed together, so gathered together
            again = [n for block in again for n in (block, block + EXPERTS) if n in self.groups]
            for name in again:
                self.gather(name, "backward")
            for name in reversed(again):
                self.differentiate(name, last)
        if self.own and "embedding" in names:
            self.gather("embedding", "backward")  # ours is a lookup, which needs no weights here
        for name in ("root", "embedding"):
            if name in names:
                self.differentiate(name, last)

    def reduce(self, stage: int) -> None:
        """A stage of a pipeline has seen its last micro-batch."""
        for name in reversed(self._names(stage)):
            self._sum(name)
            self.weights.take(name)

    def _names(self, stage: int) -> list[str]:
        names = [n for part in self.parts[stage] for n in (part, part + EXPERTS) if n in self.groups]
        return names + (["root"] if "root" in self.groups else [])

    def gather(self, name: str, phase: str) -> None:
        if name not in self.weights:
            self.gathers[name, phase] += 1
        self.weights.put(name, self.groups[name].padded * self.precision.compute_bytes)

    def differentiate(self, name: str, last: bool) -> None:
        """A group's gradients become complete, and are reduced or kept whole."""
        group, fresh = self.groups[name], f"{name} fresh"
        self.gradients.take(f"{name} waiting")
        self.gradients.put(fresh, 0 if self.adds_up(name) else group.whole * self.precision.compute_bytes)
        self.gradients.take(fresh)
        if last or self.reduces_always:
            self._sum(name)
        else:
            self.gradients.put(f"{name} whole", group.whole * self.precision.reduce_bytes)
        if self.frees or last:
            self.weights.take(name)

    def _sum(self, name: str) -> None:
        self.reductions[name] += 1
        self.gradients.take(f"{name} whole")
        self.gradients.put(f"{name} shard", self.groups[name].shard * self.precision.reduce_bytes)

    def differentiate_tied_head(self) -> None:
        """The head's gradients come first; that of the tied weight waits for the embedding's."""
        members = self.groups["root"].members
        tied = sum(p.count for p in members if p.name == EMBEDDING)
        norm = sum(p.count for p in members if p.part == "head")
        early = tied + (0 if self.adds_up("root") else norm)
        self.gradients.put("root waiting", early * self.precision.compute_bytes)

    def adds_up(self, name: str) -> bool:
        """Whether fresh gradients are added in place to whole ones of the same dtype, taking no room."""
        return f"{name} whole" in self.gradients and not self.precision.mixed
