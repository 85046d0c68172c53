"""The loader: the same samples whatever the layout, the same tail after a restart, and clean endings."""

import gc
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.batch import Batch
from fivefold.data.dataset import Sample
from fivefold.data.hashing import key_of
from fivefold.data.loader import Loader
from fivefold.data.order import Order
from fivefold.data.synthetic import RandomTokens
from fivefold.problems import BadInput


def datasets() -> list[RandomTokens]:
    return [RandomTokens(key_of(name), 6, 50, document_length=4) for name in "ab"]


def loader(
    global_batch: int, micro_batch: int, rank: int = 0, ranks: int = 1, start_step: int = 0, shares: int = 1
) -> Loader:
    return Loader(
        datasets(),
        Order([11, 7], [2, 1], seed=3),
        separate_documents=True,
        global_batch=global_batch,
        micro_batch=micro_batch,
        rank=rank,
        ranks=ranks,
        start_step=start_step,
        shares=shares,
    )


def take(source: Loader, steps: int) -> list[list[Batch]]:
    with source:
        return [next(source) for _ in range(steps)]


def rows(batches: list[Batch]) -> torch.Tensor:
    """All of a list of batches, [rows, 3, s]."""
    parts = []
    for batch in batches:
        assert batch.documents is not None
        parts.append(torch.stack([batch.tokens, batch.targets, batch.documents], dim=1))
    return torch.cat(parts)


@settings(max_examples=12)
@given(micro_batch=st.integers(1, 3), ranks=st.integers(1, 4), accumulation=st.integers(1, 3))
def test_any_layout_trains_on_the_same_samples_in_the_same_order(
    micro_batch: int, ranks: int, accumulation: int
) -> None:
    global_batch = micro_batch * ranks * accumulation
    whole = take(loader(global_batch, global_batch), 3)
    shares = [take(loader(global_batch, micro_batch, rank, ranks), 3) for rank in range(ranks)]
    for step in range(3):
        assert all(len(share[step]) == accumulation for share in shares)
        in_order = [shares[rank][step][m] for m in range(accumulation) for rank in range(ranks)]
        assert torch.equal(rows(in_order), rows(whole[step]))
        assert sum(batch.valid for batch in in_order) == whole[step][0].valid


def test_samples_are_those_the_order_names() -> None:
    order, sources = Order([11, 7], [2, 1], seed=3), datasets()
    for step, batches in enumerate(take(loader(4, 4), 5)):
        for i in range(4):
            source, index = order.locate(step * 4 + i)
            assert batches[0].tokens[i].tolist() == sources[source].sample(index).tokens[:-1].tolist()


@settings(max_examples=5)
@given(stop=st.integers(0, 7))
def test_resuming_gives_the_tail_of_an_uninterrupted_run(stop: int) -> None:
    whole = take(loader(6, 1, rank=1, ranks=2), 8)
    tail = take(loader(6, 1, rank=1, ranks=2, start_step=stop), 8 - stop)
    for expected, got in zip(whole[stop:], tail, strict=True):
        assert torch.equal(rows(expected), rows(got))


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(BadInput, match=r"10 is not a multiple .* 2 x 3\n.* to 6 or 12"):
        loader(10, 2, ranks=3)
    with pytest.raises(BadInput, match=r"Set training.global_batch to 6, or"):
        loader(5, 2, ranks=3)


class Broken:
    has_boundaries = False

    def __len__(self) -> int:
        return 100

    def sample(self, index: int) -> Sample:
        if threading.current_thread() is threading.main_thread():
            raise AssertionError("samples are to be read in the background")
        raise OSError(5, "the disk is gone")


def test_a_failure_in_the_background_reaches_the_consumer() -> None:
    broken = Loader([Broken()], Order([100], [1], 0), separate_documents=False, global_batch=1, micro_batch=1)
    with pytest.raises(OSError, match="the disk is gone"):
        next(broken)
    with pytest.raises(StopIteration):
        next(broken)


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data"]


def test_close_ends_the_thread_and_may_be_called_twice() -> None:
    one = loader(4, 2)
    next(one)
    assert len(data_threads()) == 1
    one.close()
    one.close()
    assert data_threads() == []
    with pytest.raises(StopIteration):
        next(one)


def test_an_abandoned_loader_ends_its_thread() -> None:
    one = loader(4, 2)
    next(one)
    del one
    gc.collect()
    assert data_threads() == []


def test_only_so_much_is_prepared_ahead() -> None:
    seen: list[int] = []

    class Counting(RandomTokens):
        def sample(self, index: int) -> Sample:
            seen.append(index)
            return super().sample(index)

    with Loader(
        [Counting(0, 4, 9)],
        Order([100], [1], 0),
        separate_documents=False,
        global_batch=1,
        micro_batch=1,
        prefetch=2,
    ) as ahead:
        next(ahead)
        time.sleep(0.3)
        assert len(seen) == 4  # one given, two ready, one waiting for room


def test_a_program_that_forgets_its_loader_ends_cleanly() -> None:
    program = """
from fivefold.data.corpus import open_corpus
loader = open_corpus("random", seq_len=64, vocab_size=100).train_loader(4, 2)
next(loader)
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 4), (2, 1), (4, 2), (4, 1)])
def test_a_share_of_the_batch_does_not_depend_on_the_layout_inside(ranks: int, micro_batch: int) -> None:
    """Two replicas that train alone: each has its half of every batch, however many ranks it has."""
    (whole,) = take(loader(8, 8), 1)
    each = ranks // 2
    for share in range(2):
        dealt = [take(loader(8, micro_batch, share * each + r, ranks, shares=2), 1)[0] for r in range(each)]
        found = rows([batch for batches in zip(*dealt, strict=True) for batch in batches])
        assert torch.equal(found, rows(whole)[4 * share : 4 * share + 4])
