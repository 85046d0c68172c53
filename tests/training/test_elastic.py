"""Which layout a run gets that goes on with another number of ranks."""

import os
import signal

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.checks import check
from fivefold.axes.layout import Layout
from fivefold.config import Job, dump_toml, load, resolve
from fivefold.config.run_folder import ranks_had
from fivefold.problems import BadInput
from fivefold.training.elastic import laid_out_anew, most_ranks, planned_for
from fivefold.training.launch import train
from fivefold.training.metrics import read_metrics
from tests.models.own_models import Good

MODEL = {"preset": "tiny", "layers": 4, "dim": 64, "heads": 4, "kv_heads": 4, "ffn": 128}


def job(elastic: bool = True, batch: int = 8, **layout: object) -> Job:
    return Job.model_validate(
        {
            "model": MODEL,
            "training": {"global_batch": batch, "seq_len": 32},
            "layout": layout,
            "resilience": {"elastic": elastic},
        }
    )


@pytest.mark.parametrize(
    ("layout", "ranks", "expected"),
    [
        ({}, 2, {"dp_shard": 2, "zero": 3}),
        ({"zero": 1}, 2, {"dp_shard": 2, "zero": 1}),
        ({"tp": 2}, 2, {"tp": 2, "dp_shard": 1}),
        ({"tp": 2, "dp_shard": 2}, 2, {"tp": 2, "dp_shard": 1}),
        ({"pp": 2, "dp_replicate": 2, "zero": 0}, 2, {"pp": 2, "dp_replicate": 1}),
        ({"dp_replicate": 2, "dp_shard": 2}, 2, {"dp_replicate": 1, "dp_shard": 2}),
        ({"dp_shard": 4}, 8, {"dp_shard": 8}),
    ],
)
def test_what_is_fixed_stays_where_it_goes_with_the_number(layout, ranks, expected):
    found, _ = laid_out_anew(job(**layout), ranks, "cpu")
    assert {key: getattr(found.layout, key) for key in expected} == expected


@settings(max_examples=8, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2]),
    zero=st.sampled_from([None, 0, 1, 3]),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_any_fixed_layout_goes_on_with_any_number_that_splits(tp, pp, dp, zero, ranks):
    """Where nothing else does, a planner's layout; batch, length and seed stay."""
    asked = job(tp=tp, pp=pp, **({"dp_replicate": dp} if zero == 0 else {"dp_shard": dp}), zero=zero)
    found, _ = laid_out_anew(asked, ranks, "cpu")
    assert Layout.of(found).ranks == ranks
    assert check(found) == []
    assert resolve(found, ranks, "cpu") == found
    for key in ("global_batch", "seq_len", "seed"):
        assert getattr(found.training, key) == getattr(asked.training, key)


def test_a_number_that_no_layout_has_is_refused_with_the_reasons():
    with pytest.raises(BadInput) as refused:
        laid_out_anew(job(tp=2), 7, "cpu")
    first, *reasons = refused.value.problems
    assert (first.key, first.message) == (
        "resilience.elastic",
        "there is no layout of this job for 7 ranks",
    )
    assert any("there are 7 ranks" in problem.message for problem in reasons)


def test_as_many_ranks_as_a_layout_has():
    assert most_ranks(job(tp=2, dp_shard=2), 5, "cpu") == 4  # there are 4 heads and 4 layers
    with pytest.raises(BadInput, match="no layout of this job for 0 ranks"):
        most_ranks(job(), 0, "cpu")


def test_another_number_of_ranks_is_an_elastic_jobs_or_the_users_to_choose(tmp_path):
    assert ranks_had(tmp_path) is None
    (tmp_path / "job.toml").write_text(dump_toml(resolve(job(tp=2, dp_shard=2), 4)))
    assert ranks_had(tmp_path) == 4
    found, promise = planned_for(job(tp=2, dp_shard=2), 2, "cpu", 4, restarted=True)
    assert (found.layout.tp, found.layout.dp_shard, promise) == (2, 1, None)
    with pytest.raises(BadInput) as refused:
        planned_for(job(elastic=False), 2, "cpu", 4, restarted=True)
    [problem] = refused.value.problems
    assert problem.key == "resilience.elastic"
    assert problem.message == "this run has 4 ranks, but was started again with 2"
    assert "resilience.elastic = true" in problem.hint
    assert "--nnodes" in problem.hint
    # The user may start a run again with any number that its layout goes with.
    assert planned_for(job(elastic=False), 2, "cpu", 4, restarted=False)[0].layout.dp_shard == 2
    with pytest.raises(BadInput, match="makes 4, but there are 2 ranks"):
        planned_for(job(elastic=False, dp_shard=4), 2, "cpu", 4, restarted=False)


def test_a_first_start_is_never_laid_out_anew():
    with pytest.raises(BadInput, match="makes 4, but there are 2 ranks"):
        planned_for(job(dp_shard=4), 2, "cpu", None, restarted=False)


def test_the_key_is_kept_with_the_run(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(dump_toml(resolve(job(), 1)))
    assert load(str(path)).resilience.elastic is True


# --- one machine -------------------------------------------------------------------------------------------


class Fragile(Good):
    """With three ranks one dies whenever it starts, as on a device that is broken."""

    def __init__(self) -> None:
        super().__init__()
        if dist.is_initialized() and dist.get_world_size() == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_goes_on_without_a_rank_that_dies_again_and_again(tmp_path, capsys):
    asked = Job.model_validate(
        {
            "model": {"module": "tests.training.test_elastic:Fragile"},
            "data": {"source": "random"},
            "training": {"global_batch": 6, "seq_len": 16, "steps": 3},
            "layout": {"dp_shard": 3},
            "resilience": {"elastic": True, "restarts": 2},
            "run": {"tensorboard": False},
        }
    )
    assert train(asked, nproc=3, run=tmp_path / "run").steps == 3
    said = capsys.readouterr().err
    assert said.count("Starting again from the beginning") == 2
    assert said.count("Going on with 2 ranks.") == 1
    assert ranks_had(tmp_path / "run") == 2
    assert [line["attempt"] for line in read_metrics(tmp_path / "run")] == [3, 3, 3]
