"""Which parameters of a model are Muon's: the matrices of its blocks. The others are AdamW's.

    matrices   attention's and the feed-forward's weights, shared experts'; every expert's matrix by itself
    others     embeddings, the head, norms, biases, and the router, whose rows are looked up like a table's

Of a user's own model every parameter of a block with two dimensions is a matrix.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache

from fivefold.axes.expert import is_expert
from fivefold.ledger.precision import BYTES, Precision
from fivefold.models.inventory import parameters
from fivefold.models.own.spec import OwnSpec, part_of
from fivefold.models.spec import ModelSpec

STEPS = 5
"""Of Newton-Schulz, for every matrix."""
OTHERS = (".router.weight",)


def is_matrix(spec: ModelSpec, name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates this parameter, or each entry of a stack of experts' along its first dimension."""
    if not part_of(name).startswith("blocks."):
        return False
    if isinstance(spec, OwnSpec):
        return len(shape) == 2
    return len(shape) >= 2 and name.endswith(".weight") and not name.endswith(OTHERS)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Of one matrix: in each step the Gram matrix of the smaller side, its square, and one more product."""
    small, large = min(rows, columns), max(rows, columns)
    return STEPS * (4 * small**2 * large + 2 * small**3)


def computed_in(precision: Precision) -> str:
    """In which dtype, by torch's name, matrices travel and are orthogonalised: 16 bits are enough."""
    return "float64" if precision.master == "float64" else "bfloat16"


def number_bytes(precision: Precision) -> int:
    """Bytes of one number of them."""
    return BYTES[computed_in(precision)]


@cache
def matrix_counts(spec: ModelSpec) -> tuple[int, int]:
    """Elements of one block's matrices: of all but the experts', and of the experts'."""
    found = Counter[bool]()
    for parameter in parameters(spec.model_copy(update={"layers": 1})):
        if is_matrix(spec, parameter.name, parameter.shape):
            found[is_expert(parameter.name)] += parameter.count
    return found[False], found[True]


@cache
def matrix_shapes(spec: ModelSpec) -> Counter[tuple[int, int]]:
    """By shape, how many matrices a block has."""
    found = Counter[tuple[int, int]]()
    for parameter in parameters(spec.model_copy(update={"layers": 1})):
        if is_matrix(spec, parameter.name, parameter.shape):
            rows, columns = parameter.shape[-2:]
            found[rows, columns] += parameter.shape[0] if len(parameter.shape) == 3 else 1
    return found
