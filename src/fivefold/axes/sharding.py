"""The groups of parameters that FSDP gathers and reduces together under ZeRO 1 to 3."""

from dataclasses import dataclass
from functools import cached_property

from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import Part, Piece, pieces, shard_size, sharing
from fivefold.config import Job


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP gathers and reduces together, over `ranks` ranks; sizes in elements.

    part  the kind of part of the model that they belong to
    """

    name: str
    members: list[Piece]
    ranks: int
    part: Part

    @property
    def experts(self) -> bool:
        """Whether they belong to experts that are spread over ranks."""
        return self.members[0].expert

    @cached_property
    def shard(self) -> int:
        """What one rank keeps. FSDP pads shards: of every parameter each rank keeps as much as the first."""
        return sum(shard_size(piece, self.ranks) for piece in self.members)

    @property
    def padded(self) -> int:
        return self.shard * self.ranks


EXPERTS = ".mlp.experts"


def sharded_groups(job: Job, place: Place) -> list[Group]:
    """The groups of the rank at `place`, in forward order.

    Where one rank uses a tied embedding first and last, embedding and head are one group, called "root".
    Experts that are spread over ranks are a group of their own within their block.
    """
    layout, mine = Layout.of(job), pieces(job, place)
    ends_together = job.spec.tied and not any(piece.shared for piece in mine)
    found: dict[str, list[Piece]] = {}
    for piece in mine:
        part = "root" if ends_together and piece.part in ("embedding", "head") else piece.part
        found.setdefault(part + EXPERTS if piece.expert else part, []).append(piece)
    kinds: dict[str, Part] = {"root": "embedding", "embedding": "embedding", "head": "head"}
    return [
        Group(name, members, sharing(members[0], layout.shard_ranks, layout.ep), kinds.get(name, "block"))
        for name, members in found.items()
    ]
