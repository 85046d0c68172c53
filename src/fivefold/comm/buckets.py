"""Sum gradients over ranks in fixed buckets, while backward still runs.

Gradients become ready from the last layer to the first. Each is summed over the ranks as soon as its
whole bucket is ready, so that communication hides behind the backward of the layers before it.

Which parameter goes into which bucket depends on the model alone: never on the order in which gradients
happened to arrive in some first step. Two runs of one job therefore round alike, and so does a resumed one.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from fivefold.comm.compression import CompressedSum, Residual


class PlainSum:
    """The sum of every rank's `x` over `group`, in its place, on its way: see `CompressedSum`."""

    def __init__(self, x: torch.Tensor, group: dist.ProcessGroup):
        self.x = x
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        self._work = work

    def add(self) -> None:
        """Nothing more is to be sent."""

    def result(self) -> torch.Tensor:
        self._work.wait()
        return self.x


class BucketedAllReduce:
    """Sums gradients of `masters`, those that a bucket names, over `group`, bucket by bucket.

    Call `expect(times)` before a step of `times` backward passes, `ready(index)` each time one of them has
    added to a gradient, and `finish()` after the last. `finish` replaces every `.grad` by a view into its
    bucket's summed buffer.

    compress   in which format sums travel: "none", "bf16" or "int8"
    residuals  with `feedback`, one for each bucket: what rounding has left out so far
    """

    def __init__(
        self,
        masters: Sequence[torch.Tensor],
        buckets: list[list[int]],
        group: dist.ProcessGroup,
        compress: str = "none",
        feedback: bool = False,
    ):
        self.masters = masters
        self.buckets = buckets
        self.group = group
        self.compress = compress
        sizes = [sum(masters[index].numel() for index in bucket) for bucket in buckets]
        self.residuals = [Residual(size, masters[0].device) for size in sizes] if feedback else []
        self.bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._missing: list[int] | None = None
        self._flights: list[tuple[list[int], PlainSum | CompressedSum]] = []

    def expect(self, times: int) -> None:
        """A step begins: `times` backward passes add to each gradient, which is then to be summed."""
        self._missing = [len(bucket) * times for bucket in self.buckets]

    def ready(self, index: int) -> None:
        """A backward pass has added to the gradient of parameter `index` on this rank."""
        if self._missing is None or index not in self.bucket_of:
            return
        number = self.bucket_of[index]
        self._missing[number] -= 1
        if self._missing[number] == 0:
            self._launch(number)

    def _launch(self, number: int) -> None:
        bucket = self.buckets[number]
        gradients = [self.masters[index].grad for index in bucket]
        flat = torch.cat([g.reshape(-1) for g in gradients if g is not None])
        for index in bucket:
            self.masters[index].grad = None  # the flat copy replaces them: no second set of gradients
        if self.compress == "none":
            self._flights.append((bucket, PlainSum(flat, self.group)))
            return
        residual = self.residuals[number] if self.residuals else None
        self._flights.append((bucket, CompressedSum(flat, self.group, self.compress, residual)))

    def finish(self) -> None:
        """Wait for every bucket and hand the sums back as `.grad`.

        Gradients that arrived without a hook (a pipeline that splits backward has none) are sent now.
        """
        if self._missing is None:
            return
        for number, bucket in enumerate(self.buckets):
            if self._missing[number] > 0:
                if any(self.masters[index].grad is None for index in bucket):
                    raise RuntimeError("a gradient bucket never filled: some parameters got no gradient")
                self._launch(number)
        for _, flight in self._flights:
            flight.add()
        for bucket, flight in self._flights:
            flat = flight.result()
            sizes = [self.masters[index].numel() for index in bucket]
            ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
            for index, (start, end) in zip(bucket, pairwise(ends), strict=True):
                self.masters[index].grad = flat[start:end].view_as(self.masters[index])
        self._flights = []
        self._missing = None
