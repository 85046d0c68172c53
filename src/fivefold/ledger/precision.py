"""What a precision setting means: which dtype each kind of number has (torch's name), and its bytes."""

from dataclasses import dataclass

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True)
class Precision:
    """The dtypes of one training run.

    compute  weights as the forward pass sees them, activations, and gradients as backward makes them
    master   weights as the optimizer updates them, and its moments
    reduce   gradients as they are accumulated over micro-batches and summed over ranks
    """

    name: str
    compute: str
    master: str
    reduce: str

    @property
    def mixed(self) -> bool:
        """Whether the optimizer's weights are a different copy from the ones that compute."""
        return self.compute != self.master

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.compute]

    @property
    def master_bytes(self) -> int:
        return BYTES[self.master]

    @property
    def reduce_bytes(self) -> int:
        return BYTES[self.reduce]


PRECISIONS = {
    "fp64": Precision("fp64", "float64", "float64", "float64"),
    "fp32": Precision("fp32", "float32", "float32", "float32"),
    "bf16": Precision("bf16", "bfloat16", "float32", "float32"),
    "fp16": Precision("fp16", "float16", "float32", "float32"),
}


def precision_named(name: str | None) -> Precision:
    """The precision of a resolved job's `training.precision`."""
    if name is None:
        raise ValueError("the job's precision is still open: call fivefold.config.resolve first")
    return PRECISIONS[name]


def moments_in(states: str, precision: Precision) -> str:
    """The dtype in which AdamW keeps its two moments under `optimizer.states`: uint8 are codes of numbers."""
    return {"bf16": "bfloat16", "int8": "uint8"}.get(states, precision.master)


def momentum_in(states: str, precision: Precision) -> str:
    """The dtype of Muon's momentum: in 8 bits it would need a scale, which AdamW's second moment gives the
    first.
    """
    return precision.master if states == "fp32" else "bfloat16"
