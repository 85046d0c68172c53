"""Where the time of recorded steps went: names, overlap, borders, and sums that are exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.watch.kinds import KINDS, kernel_kind, operator_kind
from fivefold.watch.profile import Profile, Promise
from fivefold.watch.profile_shown import header, ms, remarks, rows, rows_in_trace, title
from fivefold.watch.swept import Span, by_kind, swept
from fivefold.watch.trace import read
from tests.watch.traces import AUTOGRAD, FORWARD, GLOO, NORM, REDUCTION, SENDS, UPDATE, Trace

GEMM = "nvjet_sm90_hsh_256x128_64x4_1x2_h_bz_coopA_NNT"
NCCL = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FPROP = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>"
PROMISE = Promise(
    "a rank on dgx-h200", {"products": 100e-6, "optimizer": 20e-6, "messages": 30e-6, "idle": 50e-6}
)


def profile_of(
    trace: Trace, promise: Promise | str = "nobody said", rank: int = 0, ranks: int = 1
) -> Profile:
    return Profile(read(trace.told), rank, ranks, "NVIDIA H200", promise, {"torch": "2.13.0"})


def microseconds(trace: Trace) -> dict[str, float]:
    """Of each kind that there is, over all steps."""
    return {kind: ns / 1000 for kind, ns in profile_of(trace).nanoseconds.items() if ns}


# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "products",
            [
                GEMM,
                "nvjet_hsh_192x8_64x8_2x1_v_bz_TNT",
                "nvjet_sm100_qrsss_256x256_128x4_2x1_2cta_v_bz_NTT",
                "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
                "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_ffma",
                "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn",
                "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s161616gemm_bf16_128x2_tn>",
                "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::"
                "GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>>",
                "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, ...>",
                "void gemv2T_kernel_val<int, int, __nv_bfloat16, ...>",
                "triton_mm",
                "triton_tem_fused_mm_12",
                "Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64",
            ],
        ),
        (
            "attention",
            [
                FPROP,
                "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128",
                "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, ...>>",
                "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, ...>>",
                "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>",
                "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
                "triton_tem_fused_flex_attention_backward_3",
            ],
        ),
        (
            "messages",
            [
                NCCL,
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
                "void one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>",
            ],
        ),
        (
            "norms",
            [
                ADD,
                "triton_poi_fused_silu_mul_2",
                "triton_red_fused_add_mean_mul_pow_rsqrt_1",
                "triton_per_fused__to_copy_mul_sum_4",
                # A compiler's names say where the operations came from: these are elementwise all the same.
                "triton_poi_fused_addmm_relu_3",
                "triton_poi_fused__scaled_dot_product_cudnn_attention_clone_transpose_5",
                "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<...direct_copy...>>",
                "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ...MeanOps...>>",
                "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>",
                "void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>",
                "void at::native::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>",
                "void (anonymous namespace)::softmax_warp_forward<float, float, float, 3, false, false>",
            ],
        ),
        (
            "loss",
            [
                "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>",
                "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<...>",
                "triton_red_fused__log_softmax__to_copy_nll_loss_forward_7",
            ],
        ),
        (
            "optimizer",
            [
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdam...>",
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...LpNorm...>",
            ],
        ),
        ("copies", ["void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>"]),
        (None, ["some_kernel_of_tomorrow", "Kernel"]),
    ],
)
def test_kernels_are_known_by_their_names(kind: str | None, names: list[str]) -> None:
    assert {name: kernel_kind(name) for name in names} == dict.fromkeys(names, kind)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "products"),
        ("aten::_grouped_mm", "products"),
        ("aten::mm_out", "products"),
        ("aten::mul", "norms"),
        ("aten::mean", "norms"),
        ("aten::_softmax", "norms"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("aten::_fused_adamw_", "optimizer"),
        ("c10d::_allgather_base_", "messages"),
        ("fsdp::all_gather_copy_in", "copies"),
        ("MmBackward0", "idle"),
        ("autograd::engine::evaluate_function: MmBackward0", "idle"),
        ("_AllGather", "idle"),
        ("vllm::unheard_of", None),
    ],
)
def test_operators_are_known_by_their_names(name: str, kind: str | None) -> None:
    assert operator_kind(name) == kind


def test_every_kind_of_a_name_is_told() -> None:
    from fivefold.watch.kinds import KERNELS, OPERATORS, WHOLE

    assert {kind for table in (KERNELS, OPERATORS, WHOLE) for kind, _ in table} | {"other"} == set(KINDS)


# --- adding up -------------------------------------------------------------------------------------------

moments = st.integers(0, 60)


@st.composite
def spans(draw: Callable[..., Any]) -> list[Span]:
    kinds = st.sampled_from(list(KINDS))
    drawn = draw(st.lists(st.tuples(moments, moments, kinds), max_size=12))
    return [Span(min(a, b), max(a, b), kind, kind) for a, b, kind in drawn]


@st.composite
def windows(draw: Callable[..., Any]) -> list[tuple[int, int]]:
    """Up to three, some without a gap between them."""
    edges = sorted(draw(st.lists(moments, min_size=2, max_size=6, unique=True)))
    gaps = draw(st.booleans())
    pairs = zip(edges[::2], edges[1::2], strict=False) if gaps else pairwise(edges)
    return list(pairs)


@given(spans(), windows())
def test_parts_are_the_whole_and_each_moment_is_the_first_kinds_that_runs(
    ran: list[Span], steps: list[tuple[int, int]]
) -> None:
    stretches = swept(ran, steps)
    found = by_kind(stretches)
    assert min(found.values()) >= 0
    assert sum(found.values()) == sum(end - start for start, end in steps)
    # Against the plainest way to say it: moment by moment.
    slowly = dict.fromkeys(KINDS, 0)
    for start, end in steps:
        for moment in range(start, end):
            running = {span.kind for span in ran if span.start <= moment < span.end}
            slowly[next((kind for kind in KINDS if kind in running), "idle")] += 1
    assert found == slowly
    assert all(one.start < one.end for one in stretches)
    assert all(one.end <= other.start for one, other in pairwise(stretches))


# --- a GPU's trace ---------------------------------------------------------------------------------------


def on_gpu() -> Trace:
    """Two steps of 200 us without a gap: three kernels that overlap, an update that ends in the next step."""
    trace = Trace()
    trace.step(10, 0, 200)
    trace.step(11, 200, 400)
    trace.phase(FORWARD, 0, 40)
    trace.phase(REDUCTION, 40, 50)
    trace.phase(NORM, 50, 120)
    trace.phase(UPDATE, 120, 200)
    trace.phase(FORWARD, 200, 400)
    trace.kernel(GEMM, 10, 60, launched=5)
    trace.kernel(FPROP, 60, 80, launched=6)
    trace.kernel(NCCL, 50, 110, launched=41, stream=SENDS)  # 30 behind compute, 30 alone
    trace.kernel(ADD, 120, 130, launched=121)
    trace.kernel("void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", 150, 220, launched=150)
    trace.kernel(ADD, 230, 240, launched=205)
    trace.kernel(GEMM, 390, 430, launched=390)  # clipped at the end
    return trace


def test_a_gpus_time_by_kind_adds_up_to_its_steps() -> None:
    found = microseconds(on_gpu())
    assert found == {
        "products": 50 + 10,
        "attention": 20,
        "messages": 30,
        "optimizer": 10 + 70,
        "norms": 10,
        "idle": 400 - 60 - 20 - 30 - 80 - 10,
    }
    profile = profile_of(on_gpu())
    assert profile.recorded.source == "kernels"
    assert profile.recorded.steps == (10, 11)
    assert profile.hidden_s == pytest.approx(15e-6)
    assert profile.step_s == pytest.approx(200e-6)
    assert sum(profile.seconds(kind) for kind in KINDS) == pytest.approx(profile.step_s)


def test_a_kernel_belongs_to_the_phase_that_started_it_not_to_the_one_in_which_it_runs() -> None:
    trace = Trace()
    trace.step(10, 0, 100)
    trace.phase(FORWARD, 0, 20)
    trace.phase(UPDATE, 20, 100)
    trace.kernel(ADD, 30, 50, launched=10)
    trace.kernel(ADD, 60, 65, launched=25)
    assert microseconds(trace) == {"norms": 20, "optimizer": 5, "idle": 75}


def test_messages_and_copies_are_that_in_every_phase() -> None:
    trace = Trace()
    trace.step(10, 0, 100)
    trace.phase(NORM, 0, 100)
    trace.kernel(NCCL, 10, 20, launched=1, stream=SENDS)
    trace.kernel("Memcpy DtoH (Device -> Pinned)", 30, 32, launched=2, cat="gpu_memcpy")
    trace.kernel(ADD, 40, 44, launched=3)
    assert microseconds(trace) == {"messages": 10, "copies": 2, "optimizer": 4, "idle": 84}


def test_an_unknown_kernel_is_its_operators_or_other() -> None:
    trace = Trace()
    trace.step(10, 0, 100)
    trace.operator("aten::mm", 1, 5, AUTOGRAD)
    trace.operator("MmBackward0", 0, 8, AUTOGRAD)
    trace.kernel("kernel_of_tomorrow", 20, 30, launched=2, thread=AUTOGRAD)
    trace.kernel("kernel_of_tomorrow", 40, 47, launched=6, thread=AUTOGRAD)  # between operators
    assert microseconds(trace) == {"products": 10, "other": 7, "idle": 83}
    for number in range(20):
        trace.kernel(f"kernel_{number}_of_tomorrow", 60 + number, 60.5 + number, launched=60 + number)
    told = profile_of(trace).told()["kinds"]["other"]["biggest"]
    assert {one["name"] for one in told} == {"kernel_of_tomorrow"} | {
        f"kernel_{number}_of_tomorrow" for number in range(20)
    }


def test_all_kernels_of_an_attention_are_attention_but_its_messages() -> None:
    """The merging of blocks is elementwise by name, and so is a loss' exponential over a split vocabulary."""
    trace = Trace()
    trace.step(10, 0, 100)
    trace.operator("fivefold::ring_attention", 0, 10)
    trace.operator("aten::logaddexp", 2, 3)
    trace.operator("_SummedCrossEntropy", 20, 30)
    trace.operator("aten::exp", 22, 24)
    trace.operator("aten::mm", 25, 27)
    trace.kernel(ADD, 30, 35, launched=2.5)
    trace.kernel(NCCL, 40, 43, launched=5, stream=SENDS)
    trace.kernel(ADD, 50, 52, launched=23)
    trace.kernel(GEMM, 60, 61, launched=26)
    assert microseconds(trace) == {"attention": 5, "messages": 3, "loss": 2, "products": 1, "idle": 89}


def test_what_runs_between_steps_is_in_none_of_them() -> None:
    trace = Trace()
    trace.step(10, 0, 50)
    trace.step(11, 150, 200)
    trace.kernel(GEMM, 40, 160, launched=1)  # a validation's, let us say
    assert microseconds(trace) == {"products": 20, "idle": 80}


# --- a CPU's trace ---------------------------------------------------------------------------------------


def test_on_a_cpu_each_operator_has_the_time_that_it_does_not_spend_in_others() -> None:
    trace = Trace()
    trace.step(10, 0, 100)
    trace.phase(FORWARD, 0, 60)
    trace.phase(UPDATE, 60, 100)
    trace.operator("aten::linear", 10, 30)
    trace.operator("aten::t", 11, 14)
    trace.operator("aten::addmm", 15, 29)
    trace.operator("AddmmBackward0", 35, 45)
    trace.operator("aten::mul", 36, 40)
    trace.operator("aten::mul", 70, 80)
    found = microseconds(trace)
    assert found == {"products": 17, "norms": 3 + 4, "optimizer": 10, "idle": 66}
    assert profile_of(trace).recorded.source == "operators"


def test_messages_of_gloo_count_where_no_operator_computes() -> None:
    trace = Trace()
    trace.step(10, 0, 100)
    trace.operator("c10d::allreduce_", 10, 12)
    trace.add("user_annotation", "gloo:all_reduce", 11, 50, GLOO)
    trace.operator("aten::mm", 20, 40)
    trace.operator("_AllReduce", 41, 60)  # waits, and computes nothing
    profile = profile_of(trace)
    assert microseconds(trace) == {"products": 20, "messages": 20, "idle": 60}
    assert profile.hidden_s == pytest.approx(20e-6)


def test_an_operator_inside_another_of_a_whole_kind_is_of_that() -> None:
    trace = Trace()
    trace.step(10, 0, 100)
    trace.operator(
        "autograd::engine::evaluate_function: ScaledDotProductFlashAttentionForCpuBackward0", 0, 50
    )
    trace.operator("ScaledDotProductFlashAttentionForCpuBackward0", 10, 40)
    trace.operator("aten::bmm", 15, 20)
    trace.operator("c10d::send", 25, 28)
    assert microseconds(trace) == {"attention": 27, "messages": 3, "idle": 70}
    assert profile_of(trace).biggest[0].name == "ScaledDotProductFlashAttentionForCpuBackward0"


def test_compiled_code_without_operators_is_other() -> None:
    trace = Trace()
    trace.step(10, 0, 100)
    trace.operator("CompiledFunction", 0, 50)
    trace.operator("## Call CompiledFxGraph fq3 ##", 10, 40)
    trace.operator("aten::mm", 15, 20)
    assert microseconds(trace) == {"products": 5, "other": 25, "idle": 70}


def test_a_trace_without_steps_has_none() -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 10, launched=0)
    assert read(trace.told).steps == ()


# --- what is told ----------------------------------------------------------------------------------------


def test_each_kind_stands_beside_its_promise() -> None:
    profile = profile_of(on_gpu(), PROMISE, ranks=8)
    cells = {row[0]: row[1:] for row in rows(profile)}
    assert cells["products"] == ("0.03", "15.0%", "0.10", "0.30")
    assert cells["messages"] == ("0.02", "7.5%", "0.03", "0.50")
    assert cells["norms, elementwise"] == ("0.01", "2.5%", "", "")
    assert cells["step"] == ("0.20", "100.0%", "0.20", "1.00")
    assert "copies" not in cells
    assert len(header(profile)) == 5
    assert "rank 0 of 8" in title(profile)
    told = profile.told()
    assert told["promise"]["step_s"] == pytest.approx(200e-6)
    assert {kind for kind in KINDS if told["kinds"][kind]["promised_s"]} == set(PROMISE.kinds)
    assert json.loads(json.dumps(told)) == told


def test_without_a_promise_the_table_says_why() -> None:
    profile = profile_of(on_gpu(), "no cluster is named")
    assert header(profile) == ("", "ms a step", "share")
    assert all(len(row) == 3 for row in rows(profile))
    assert "no promise: no cluster is named" in remarks(profile)
    assert (profile.told()["promise"], profile.told()["no_promise"]) == (None, "no cluster is named")


def test_the_longest_come_first_and_no_line_is_wider_than_a_terminal() -> None:
    lines = remarks(profile_of(on_gpu(), PROMISE))
    assert "optimizer: void multi_tensor_apply" in lines[1]
    assert "messages: ncclDevKernel" in lines[2]
    assert "products: nvjet" in lines[3]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("seconds", "said"), [(12.34, "12,340"), (0.99996, "1,000"), (0.5123, "512.3"), (0.0012, "1.20")]
)
def test_milliseconds_have_as_many_places_as_say_something(seconds: float, said: str) -> None:
    assert ms(seconds) == said


def test_the_trace_shows_the_same_times_and_the_promise_below_the_first_step() -> None:
    profile = profile_of(on_gpu(), PROMISE)
    events = rows_in_trace(profile)
    drawn = [event for event in events if event["ph"] == "X"]
    measured = [event for event in drawn if event["tid"] == 1]
    assert sum(event["dur"] for event in measured) == pytest.approx(400)
    for kind, told in KINDS.items():
        mine = sum(event["dur"] for event in measured if event["name"] == told)
        assert mine == pytest.approx(profile.nanoseconds[kind] / 1000)
    promised = [event for event in drawn if event["tid"] == 2]
    assert [event["name"] for event in promised] == [KINDS[kind] for kind in PROMISE.kinds]
    assert promised[0]["ts"] == 0
    assert promised[-1]["ts"] + promised[-1]["dur"] == pytest.approx(200)
    assert read({"traceEvents": [*on_gpu().events, *events]}) == read(on_gpu().told)
