"""What is to be known of a pipeline schedule, and what follows. No torch here: planners read it too."""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice, product
from typing import Any, Literal

from fivefold.schedules.actions import COMPUTATIONS, Action, Computed, with_messages, with_reduce
from fivefold.schedules.orders import Order


@dataclass(frozen=True, eq=False)
class Schedule:
    """One way to send micro-batches through the stages of a pipeline.

    what     one line on it
    order    what each rank computes; None where it is searched for (`planner/play/zero_bubble.py`)
    stages   how many a rank holds; None for any number
    shape    under a loop stage s is on rank s mod ranks; under a v the stages go down the ranks and come back
             up, so that the first rank has the first and the last
    use      whether a search tries it unasked, only a job that names it has it, or neither

    micro_batches_per_rank  with fewer than these it is not defined; 0 where one is enough
    equal_rounds   micro-batches must go in equal rounds
    memory_limit   of a search for the order: micro-batches for each rank of the pipeline
    proven         a test holds the row: its order is not tried out here
    """

    name: str
    what: str = ""
    order: Order | None = None
    stages: int | None = 1
    shape: Literal["loop", "v"] = "loop"
    use: Literal["search", "job", "planning"] = "search"
    micro_batches_per_rank: int = 0
    equal_rounds: bool = False
    memory_limit: int | None = None
    proven: bool = False

    def __post_init__(self) -> None:
        if wrong := None if self.proven else self.contradiction():
            raise ValueError(f"schedule '{self.name}': {wrong}")

    def contradiction(self) -> str | None:
        """What is missing in the row, or contradicts itself or the order."""
        if not self.what:
            return "has no line on what it is"
        if self.shape not in ("loop", "v") or (self.shape == "v" and self.stages != 2):
            return f"shape '{self.shape}' with {self.stages} stages a rank: known are loop, and v with 2"
        if self.order is None or self.memory_limit is not None:
            if self.order is None and self.memory_limit and self.use == "planning":
                return None
            return "needs an order; or to search for one, a memory limit and use for planning"
        ranks, virtual = 2, self.usual_stages
        count = max(4, self.fewest(ranks))
        try:
            done = [action for row in self.actions(ranks, count, virtual) for action in row]
        except ValueError as error:
            return str(error)
        for stage, number in product(range(ranks * virtual), range(count)):
            kinds = [kind for kind, *where in done if where == [stage, number] and kind in COMPUTATIONS]
            halves = ["backward"] if "backward" in kinds else ["backward-input", "backward-weight"]
            if sorted(kinds) != [*halves, "forward"]:
                return f"stage {stage} does not run micro-batch {number} forward and backward once"
        return None

    @property
    def usual_stages(self) -> int:
        """How many stages a rank holds unless the job says."""
        return self.stages or 2

    def stages_of(self, rank: int, ranks: int, virtual_stages: int) -> list[int]:
        """The stages of one rank, in forward order."""
        if self.shape == "v":
            return [rank, 2 * ranks - 1 - rank]
        return [rank + ranks * turn for turn in range(virtual_stages)]

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank that holds a stage."""
        if self.shape == "v" and stage >= ranks:
            return 2 * ranks - 1 - stage
        return stage % ranks

    def fewest(self, ranks: Any) -> Any:
        """With fewer micro-batches than these it is not defined; for plain numbers or arrays of them."""
        return self.micro_batches_per_rank * ranks if self.micro_batches_per_rank else 1

    def allows(self, ranks: Any, micro_batches: Any) -> Any:
        """Whether it is defined for these numbers of ranks and micro-batches, plain ones or arrays."""
        enough = micro_batches >= self.fewest(ranks)
        if not self.equal_rounds:
            return enough
        rounds = micro_batches // ranks
        return enough & (micro_batches % (rounds + (rounds == 0)) == 0)

    def needed(self, ranks: int, micro_batches: int) -> tuple[str, list[int]]:
        """Where it is not defined: how many micro-batches it needs, in words; and the nearest it allows."""
        fewest = self.fewest(ranks)
        needs = f"at least {fewest}" if micro_batches < fewest else f"a multiple of {micro_batches // ranks}"
        below = (n for n in range(micro_batches - 1, 0, -1) if self.allows(ranks, n))
        above = (n for n in range(micro_batches + 1, micro_batches + 2 * ranks + 1) if self.allows(ranks, n))
        return needs, [*islice(below, 1), *islice(above, 1)]

    def computed(self, rank: int, ranks: int, micro_batches: int, virtual_stages: int = 1) -> Computed:
        """What one rank computes in one step, without messages."""
        if self.order is None:
            raise ValueError(f"'{self.name}' has no order of its own: it is searched for")
        own = self.stages_of(rank, ranks, virtual_stages)
        return Computed.of(self.order(rank, ranks, micro_batches, own))

    def actions(self, ranks: int, micro_batches: int, virtual_stages: int = 1) -> list[list[Action]]:
        """What every rank does in one step, rank by rank, sends and receives included."""
        if not self.allows(ranks, micro_batches):
            raise ValueError(f"{self.name} is not defined for {micro_batches} micro-batches on {ranks} ranks")
        every = [list(self.computed(rank, ranks, micro_batches, virtual_stages)) for rank in range(ranks)]
        stages = ranks * len(self.stages_of(0, ranks, virtual_stages))
        return with_messages(map(with_reduce, every), stages, lambda stage: self.rank_of(stage, ranks))

    @cached_property
    def _example(self) -> list[Action]:
        """What the first of two ranks computes; nothing where the order is searched for."""
        many = max(16, self.fewest(2))
        return list(self.computed(0, 2, many, self.usual_stages)) if self.order else []

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed at different times."""
        return self.order is None or any(action.kind == "backward-input" for action in self._example)

    @cached_property
    def forwards_first(self) -> bool:
        """Whether each stage's forward passes all come before its backward passes."""
        return self.order is not None and not any(
            before.stage == after.stage and before.kind != "forward" and after.kind == "forward"
            for before, after in combinations(self._example, 2)
        )
