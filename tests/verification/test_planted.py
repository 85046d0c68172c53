"""`verify` names the axis of every planted bug."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.training.failures import RanksFailed
from fivefold.verification import Verdict
from tests.cases import SPEC, TIED, Case
from tests.verification import planted
from tests.verification.planted import verdicts_on

MOE = SPEC | {"experts": 4, "experts_per_token": 2}
ONE = {"dp_replicate": 1, "dp_shard": 1}


def assert_named(
    monkeypatch: Any, case: Case, bugs: dict[Any, str], precision: str = "fp64"
) -> dict[str, Verdict]:
    """Each bug is found, and the axis that it is in."""
    verdicts = verdicts_on(case, list(bugs), monkeypatch, precision)
    for plant, axis in bugs.items():
        verdict = verdicts[plant.__name__]
        assert not verdict.ok, f"{plant.__name__} was not seen"
        assert verdict.axis == axis, f"{plant.__name__}: {verdict}"
        assert f"axis: {axis}" in verdict.sentence()
    return verdicts


def test_bugs_of_shards_and_of_tensor_ranks(monkeypatch: Any) -> None:
    verdicts = assert_named(
        monkeypatch,
        Case("bugs", 4, ONE | {"dp_shard": 2, "tp": 2}),
        {
            planted.every_rank_gets_the_same_data: "dp_shard",
            planted.gradients_are_averaged_over_shards: "dp_shard",
            planted.heldout_losses_are_averaged_over_ranks: "dp_shard",
            planted.rows_change_places_under_tp: "tp",
            planted.the_norm_counts_copies_twice: "tp",
        },
    )
    sentences = {name: verdict.sentence() for name, verdict in verdicts.items()}
    heldout = verdicts["heldout_losses_are_averaged_over_ranks"]
    assert heldout.worst_gradient_error < 1e-12
    assert "different: the held-out loss is " in heldout.sentence()
    assert "the gradient norm is " in sentences["the_norm_counts_copies_twice"]
    averaged = verdicts["gradients_are_averaged_over_shards"]
    assert averaged.worst_gradient_error == pytest.approx(0.5)
    assert "is off by 5.0e-01 of its size (loss " in averaged.sentence()


def test_bugs_of_stages_and_of_context_ranks(monkeypatch: Any) -> None:
    verdicts = assert_named(
        monkeypatch,
        Case("bugs", 4, ONE | {"pp": 2, "cp": 2}, {"global_batch": 8, "micro_batch": 2}),
        {
            planted.every_row_has_the_first_ones_documents_under_cp: "cp",
            planted.gradients_are_not_summed_over_cp: "cp",
            planted.losses_are_not_divided_by_micro_batches: "pp",
            planted.each_stage_clips_by_its_own_norm: "pp",
        },
    )
    clipped = verdicts["each_stage_clips_by_its_own_norm"]
    assert "the gradient that the optimizer gets of " in clipped.sentence()


def test_bugs_of_replicas(monkeypatch: Any) -> None:
    verdicts = assert_named(
        monkeypatch,
        Case("bugs", 2, {"zero": 0, "bucket_mb": 0.02}),
        {
            planted.every_rank_gets_the_same_data: "dp_replicate",
            planted.one_bucket_is_not_reduced: "dp_replicate",
            planted.adam_forgets_how_many_steps_it_took: "dp_replicate",
        },
    )
    assert "the gradient of " in verdicts["one_bucket_is_not_reduced"].sentence()
    adam = verdicts["adam_forgets_how_many_steps_it_took"]
    assert adam.worst_gradient_error < 1e-12  # both steps' gradients are right, and the second update is not
    assert "the update of " in adam.sentence()


def test_gradients_that_are_doubled_in_16_bits_alone(monkeypatch: Any) -> None:
    case = Case("bugs", 2, {"zero": 0}, {"precision": "bf16"})
    bugs = {planted.gradients_in_16_bits_count_twice: "dp_replicate"}
    verdicts = assert_named(monkeypatch, case, bugs, precision="job")
    sentence = verdicts["gradients_in_16_bits_count_twice"].sentence()
    assert sentence.startswith("different in bf16: the gradient of ")
    assert verdicts["gradients_in_16_bits_count_twice"].parts[0].ok
    assert verdicts_on(case, list(bugs), monkeypatch)["gradients_in_16_bits_count_twice"].ok


def test_bugs_of_experts(monkeypatch: Any) -> None:
    assert_named(
        monkeypatch,
        Case("bugs", 4, ONE | {"dp_shard": 2, "cp": 2, "ep": 2}, {"balance": "bias"}, spec=MOE),
        {
            planted.experts_are_averaged_over_ep: "ep",
            planted.balance_forgets_tokens_of_other_cp_ranks: "cp",
        },
    )


@pytest.mark.slow
def test_bugs_of_copies_of_shards(monkeypatch: Any) -> None:
    bugs = {
        planted.replicas_get_the_same_data: "dp_replicate",
        # Only with both axes on are there replicas of shards to reduce.
        planted.replicas_are_not_reduced: "dp_replicate with dp_shard",
        planted.every_rank_gets_the_same_data: "more than one of dp_replicate, dp_shard",
    }
    assert_named(monkeypatch, Case("bugs", 4, {"zero": 3, "dp_replicate": 2, "dp_shard": 2}), bugs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "ranks", "layout", "spec", "axis"),
    [
        (planted.tied_weights_are_untied, 4, {"pp": 2, "dp_replicate": 2, "zero": 0}, TIED, "pp"),
        (planted.a_bias_is_added_by_every_tp_rank, 4, {"tp": 2, "cp": 2}, TIED, "tp"),
        (planted.the_norm_forgets_other_ranks, 2, {"dp_shard": 2, "zero": 3}, SPEC, "dp_shard"),
    ],
)
def test_more_bugs(plant: Any, ranks: int, layout: Any, spec: Any, axis: str, monkeypatch: Any) -> None:
    assert_named(
        monkeypatch, Case("bug", ranks, ONE | layout, {"global_batch": 16}, spec=spec), {plant: axis}
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_sums_that_miss_a_rank_are_seen_in_the_jobs_precision(precision: str, monkeypatch: Any) -> None:
    """Of what float64 sees as well, the bounds of lower precisions see what matters."""
    case = Case("bugs", 2, {"zero": 0, "bucket_mb": 0.02}, {"precision": precision})
    verdicts = verdicts_on(
        case, [planted.every_rank_gets_the_same_data, planted.one_bucket_is_not_reduced], monkeypatch, "job"
    )
    for verdict in verdicts.values():
        assert not verdict.parts[1].ok


@pytest.mark.slow
def test_a_bug_that_loses_gradients_is_an_error(monkeypatch: Any) -> None:
    case = Case("bug", 4, {"zero": 3, "dp_replicate": 2, "dp_shard": 2})
    with pytest.raises(RanksFailed, match=r"embedding\.tokens\.weight got no gradient"):
        verdicts_on(case, [planted.replicas_never_come_together], monkeypatch)
