"""The batches of one data rank, step after step, prepared in the background.

Step s trains on the global samples s * global_batch + i. With M micro-batches a step, micro-batch m of
data rank d takes i = (m * ranks + d) * micro_batch + (0 ... micro_batch - 1). So the samples of a step
do not depend on the layout, and where a loader stands is told by the step number alone.

Replicas that train alone get shares of the batch that do not depend on their layout either: each share is
dealt to its data ranks as if it were the whole batch.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

import torch

from fivefold.data.batch import Batch, collate
from fivefold.data.dataset import Dataset
from fivefold.data.order import Order
from fivefold.problems import BadInput, Problem, nearest_multiples


class Loader:
    """An endless iterator over optimizer steps: each gives this rank's micro-batches of that step.

    datasets            the sources that `order` draws from
    separate_documents  see `batch.collate`
    rank, ranks         the data rank, and how many there are
    shares              into how many shares the batch is cut first, with as many data ranks each
    start_step          first step to give; a resumed run names the step it stopped before
    prefetch            steps prepared ahead, by a thread

    On a machine with CUDA, batches are in pinned memory. Close it when done (it is a context
    manager); it also closes when it is garbage-collected and when the program ends.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        order: Order,
        *,
        separate_documents: bool,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
        prefetch: int = 2,
        shares: int = 1,
    ) -> None:
        _check_division(global_batch, micro_batch, ranks)
        micro_batches = global_batch // (micro_batch * ranks)
        each = ranks // shares
        begin, place = rank // each * (global_batch // shares), rank % each

        def prepare(step: int) -> list[Batch]:
            batches = []
            for m in range(micro_batches):
                first = step * global_batch + begin + (m * each + place) * micro_batch
                places = [order.locate(number) for number in range(first, first + micro_batch)]
                samples = [datasets[source].sample(index) for source, index in places]
                batches.append(replace(collate(samples, separate_documents), first=first))
            return batches

        self._ready: queue.Queue[list[Batch] | Exception] = queue.Queue(maxsize=prefetch)
        stop = threading.Event()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        # The thread must not know `self`, or an abandoned loader would never be collected.
        thread = threading.Thread(
            target=_work, args=(prepare, start_step, self._ready, stop, device), name="data", daemon=True
        )
        self._finalizer = weakref.finalize(self, _stop, stop, self._ready, thread)
        thread.start()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next step's micro-batches. Raises what went wrong in the background, if anything did."""
        if not self._finalizer.alive:
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Stop the thread and wait for it. Does no harm twice."""
        self._finalizer()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_division(global_batch: int, micro_batch: int, ranks: int) -> None:
    together = micro_batch * ranks
    if global_batch % together:
        choices = nearest_multiples(global_batch, together)
        raise BadInput(
            [
                Problem(
                    "training.global_batch",
                    f"{global_batch} is not a multiple of micro_batch x data ranks = {micro_batch} x {ranks}",
                    f"Set training.global_batch to {choices}, or change training.micro_batch.",
                )
            ]
        )


def _work(
    prepare: Callable[[int], list[Batch]],
    step: int,
    ready: queue.Queue[list[Batch] | Exception],
    stop: threading.Event,
    device: int | None,
) -> None:
    """Prepare step after step until told to stop or something fails; a failure is handed over too."""
    if device is not None:
        # The current device is a thread's own: without this every rank would pin through GPU 0.
        torch.cuda.set_device(device)
    while not stop.is_set():
        item: list[Batch] | Exception
        try:
            item = prepare(step)
            if device is not None:
                item = [batch.pin_memory() for batch in item]
        except Exception as error:
            item = error
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if isinstance(item, Exception):
            return
        step += 1


def _stop(
    stop: threading.Event, ready: queue.Queue[list[Batch] | Exception], thread: threading.Thread
) -> None:
    stop.set()
    with contextlib.suppress(queue.Empty):
        while True:  # makes room, so that a thread that waits to hand over goes on and sees `stop`
            ready.get_nowait()
    if thread is not threading.current_thread():
        thread.join()
