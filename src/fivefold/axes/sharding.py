"""What FSDP gathers together, and what it keeps on one rank in the course of a step under ZeRO 1 to 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import EMBEDDING, Part, Piece, pieces, shard_size, sharing
from fivefold.axes.stages import actions, stages, stages_of
from fivefold.ledger.recompute import segment_length
from fivefold.ledger.setup import Setup
from fivefold.ledger.shelf import Shelf

if TYPE_CHECKING:
    from fivefold.config import Job


@dataclass(frozen=True)
class Group:
    """What FSDP gathers and reduces together, over `ranks` ranks; sizes in elements.

    part     the kind of part of the model that it is of
    experts  it is of experts that ranks have spread among them
    """

    name: str
    members: list[Piece]
    ranks: int
    part: Part
    experts: bool

    @property
    def whole(self) -> int:
        return sum(piece.count for piece in self.members)

    @property
    def shard(self) -> int:
        """What one rank keeps: of every parameter the first rank's rows, so that all keep equally much."""
        return sum(shard_size(piece, self.ranks) for piece in self.members)

    @property
    def padded(self) -> int:
        return self.shard * self.ranks


EXPERTS = ".mlp.experts"


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


def sharded_groups(job: Job, place: Place) -> list[Group]:
    """The groups of the rank at `place`."""
    layout = Layout.of(job)
    kinds: dict[str, Part] = {"root": "embedding", "embedding": "embedding", "head": "head"}
    return [
        Group(
            name,
            members,
            sharing(members[0], layout.shard_ranks, layout.ep),
            kinds.get(name, "block"),
            members[0].expert,
        )
        for name, members in groups(job, pieces(job, place)).items()
    ]


def played_step(job: Job, place: Place) -> Play:
    """A step of the rank at `place`, played from its first forward to its last reduction."""
    play = Play(job, place)
    repeats = int(Setup.of(job).micro_batches)
    if job.layout.pp == 1:
        for repeat in range(repeats):
            play.forward(0)
            play.backward(0, last=repeat == repeats - 1)
        return play
    for action in actions(job)[place.pp]:
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
    """

    def __init__(self, job: Job, place: Place):
        setup, cut = Setup.of(job), stages(job)
        self.weights, self.gradients = Shelf(), Shelf()
        self.precision, self.recompute = setup.precision, setup.recompute
        self.looks_up = setup.spec.looks_up
        self.groups = {group.name: group for group in sharded_groups(job, place)}
        self.frees, self.reduces_always = setup.frees_weights, setup.reduces_every_micro_batch
        self.parts = {stage: cut[stage] for stage in stages_of(job, place.pp)}

    def forward(self, stage: int) -> None:
        """A micro-batch's forward through one stage."""
        for name in self._names(stage):
            self.gather(name)
            if self.frees and name not in ("head", "root"):
                self.weights.take(name)

    def backward(self, stage: int, last: bool) -> None:
        """A micro-batch's backward through one stage; `last` where its end is the end of the step."""
        names = self._names(stage)
        if "root" in names:
            self.differentiate_tied_head()
        elif "head" in names:
            self.gather("head")
            self.differentiate("head", last)
        blocks = [name for name in names if name.startswith("blocks.") and not name.endswith(EXPERTS)]
        segment = segment_length(self.recompute, len(blocks)) or 1
        for start in reversed(range(0, len(blocks), segment)):
            again = blocks[start : start + segment]  # recomputed together, so gathered together
            again = [n for block in again for n in (block, block + EXPERTS) if n in self.groups]
            for name in again:
                self.gather(name)
            for name in reversed(again):
                self.differentiate(name, last)
        if not self.looks_up and "embedding" in names:
            self.gather("embedding")
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

    def gather(self, name: str) -> None:
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
