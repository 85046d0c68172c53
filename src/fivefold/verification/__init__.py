"""Does this layout compute what one process computes? `fivefold verify` answers for a user's own job.

A shrunken copy of the job (narrow, few layers, short sequences, float64, packed random documents) takes two
optimizer steps on one process and two under the job's layout. Loss, gradient norm, every gradient before and
after clipping, the update, the experts' biases and the held-out loss are compared. In float64 rounding is
some 1e-15, and a bug is not: there is nothing in between to argue about.

    shrink.py       the small copy, which splits as the job does
    compute.py      what a rank runs
    compare.py      how far apart two such runs are
    rounding.py     how far apart they may be in the job's own precision
    blame.py        the axis at fault
    verdict.py      what is told, and unexercised.py what the verdict says nothing about
    proof.py        `verify`, which puts these together
"""

from fivefold.verification.compare import ROUNDING as ROUNDING
from fivefold.verification.compare import gradient_error as gradient_error
from fivefold.verification.proof import verify as verify
from fivefold.verification.verdict import Verdict as Verdict
