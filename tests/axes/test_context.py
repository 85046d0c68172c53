"""The context axis: attention across ranks is attention on one process, and costs what the ledger says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fivefold.axes import context
from fivefold.axes.checks import check
from fivefold.axes.layout import Layout, Place
from fivefold.axes.runtime import context_split, partial_attention, zigzag
from fivefold.axes.runtime.context_split import local_inputs
from fivefold.axes.runtime.partial_attention import Block
from fivefold.axes.runtime.ring import ring_attention, ring_attention_backward
from fivefold.comm import compat
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.ledger.ledger import Ledger
from fivefold.ledger.setup import Setup
from fivefold.models.attention import AttentionCore, Context, attention_mask
from fivefold.models.decoder import Decoder
from fivefold.models.initial import initialise
from fivefold.training.recompute import apply_recompute
from tests.cases import SPEC, TIED, Case, mesh_of, passes
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

KINDS = ("ring", "ulysses", "allgather")
MQA: dict[str, Any] = SPEC | {"kv_heads": 1, "qk_norm": True}
LENGTH = 32
NAMES = ("result", "query", "key", "value")


def packed(rows: int, length: int, seed: int) -> Tensor:
    """Documents [rows, length] of random lengths; the first row is one, the second has short ones."""
    generator = torch.Generator().manual_seed(seed)
    often = torch.tensor([0.0, 0.5, 0.1, 0.03]).repeat(rows)[:rows, None]
    return (torch.rand(rows, length, generator=generator) < often).cumsum(1)


def document_boundaries(documents: Tensor) -> Tensor:
    """As the loader gives them."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.cat((begins.flatten().nonzero().flatten(), torch.tensor([documents.numel()]))).int()


# --- who sees whom -----------------------------------------------------------------------------------------


def planned_pairs(documents: Tensor, ranks: int) -> Tensor:
    """How often each pair (query, key) is worked on, by all ranks together: [B, S, S]."""
    rows, length = documents.shape
    pairs = torch.zeros(rows, length, length, dtype=torch.int64)
    held = [zigzag.local_part(torch.arange(length), rank, ranks) for rank in range(ranks)]
    for rank in range(ranks):
        boundaries = zigzag.local_boundaries(documents, rank, ranks)
        for begin, end in pairwise(boundaries.tolist()):
            row, place = divmod(begin, length // ranks)
            mine = held[rank][place : place + end - begin]
            if len(mine):
                pairs[row, mine[:, None], mine] += torch.ones(len(mine), len(mine), dtype=torch.int64).tril()
        counts = zigzag.visible_counts(documents, rank, ranks)
        for source in set(range(ranks)) - {rank}:
            queries, keys = zigzag.halves(rank, source, length // ranks)
            for row, (first, last) in enumerate(counts[source].tolist()):
                assert (first > 0) == (last > 0)
                seen = held[source][keys]
                pairs[row, held[rank][queries][:first, None], seen[len(seen) - last :]] += 1
    return pairs


@given(st.integers(2, 4), st.integers(1, 4), st.data())
def test_the_plan_is_what_the_mask_shows(ranks: int, chunk: int, data: st.DataObject) -> None:
    """Every visible pair once, no other pair at all. Numbers of documents may come back in a row."""
    length = 2 * ranks * chunk
    starts = data.draw(
        st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=2)
    )
    documents = torch.tensor(starts).int().cumsum(1)
    mask = attention_mask(length, documents.device, documents, None)
    assert mask is not None
    assert torch.equal(planned_pairs(documents, ranks), mask[:, 0].long())
    assert torch.equal(planned_pairs(documents % 2, ranks), mask[:, 0].long())


def test_work_is_even() -> None:
    """In one document, every rank looks at as many pairs as any other."""
    pairs = planned_pairs(torch.zeros(1, 48, dtype=torch.int64), 4)[0]
    held = [zigzag.local_part(torch.arange(48), rank, 4) for rank in range(4)]
    assert len({int(pairs[mine].sum()) for mine in held}) == 1


# --- attention alone ---------------------------------------------------------------------------------------


def attention_job(kind: str, ranks: int, heads: int, kv_heads: int, head_dim: int, length: int) -> Job:
    spec = SPEC | {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "layers": 1,
        "positions": "learned",
        "max_seq_len": length,
    }
    return Case(kind, ranks, {"cp": ranks, "cp_kind": kind}, {"seq_len": length}, spec=spec).job()


def forward_backward(core: nn.Module, inputs: list[Tensor], grad: Tensor, about: Any) -> list[Tensor]:
    """The result and the gradients of query, key and value, in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = core(*leaves, about)
    out.backward(grad)
    return [x.detach().double() for x in (out, *(leaf.grad for leaf in leaves))]


def attention_errors(
    world: Any,
    cases: list[tuple[str, int, int, bool]],
    device: str,
    dtype: torch.dtype,
    length: int,
    width: int,
) -> list[list[tuple[str, float, float]]]:
    """For each case (kind, heads, key heads, documents): of the result and each gradient, the name, the
    relative error of this rank's part and that of plain attention in the same dtype, both against float64.
    """
    found = []
    for kind, heads, kv_heads, separate in cases:
        job = attention_job(kind, world.size, heads, kv_heads, width, length)
        mesh = mesh_of(Layout.of(job))
        torch.manual_seed(heads * kv_heads)
        shapes = [(4, h, length, width) for h in (heads, kv_heads, kv_heads, heads)]
        *whole, grad = (torch.randn(shape, dtype=torch.float64).to(dtype).to(device) for shape in shapes)
        documents = packed(4, length, heads) if separate else None
        mask = attention_mask(
            length, whole[0].device, None if documents is None else documents.to(device), None
        )
        plain = Context(None, mask)
        exact = forward_backward(AttentionCore(), [x.double() for x in whole], grad.double(), plain)
        rounded = forward_backward(AttentionCore(), whole, grad, plain)

        with torch.device("meta"):
            model = Decoder(job.spec)
        context_split.split(model, mesh, job)
        index = torch.arange(length).expand(4, length)
        boundaries = None if documents is None else document_boundaries(documents)
        inputs = {"tokens": index, "documents": documents, "boundaries": boundaries}
        local = local_inputs(inputs, mesh.place, job)
        assert local["tokens"] is not None
        mine = local["tokens"][0].to(device)
        on_device = {name: x if x is None else x.to(device) for name, x in local.items()}
        hidden = torch.empty(4, len(mine), job.spec.dim, dtype=dtype, device=device)
        make_context: Any = model.make_context
        about = make_context(hidden, *(on_device[name] for name in ("positions", "documents", "boundaries")))
        block: Any = model.blocks["0"]
        core = block.attention.core
        parts = forward_backward(core, [x[:, :, mine] for x in whole], grad[:, :, mine], about)
        errors: list[tuple[str, float, float]] = []
        for name, part, approximate, true in zip(NAMES, parts, rounded, exact, strict=True):
            here = true[:, :, mine]
            off, plainly_off = (
                float((x - here).norm() / here.norm()) for x in (part, approximate[:, :, mine])
            )
            errors.append((name, off, plainly_off))
        found.append(errors)
    return found


HEADS = [(4, 4), (8, 2), (4, 1)]
CASES = [(kind, *heads, separate) for kind in KINDS for heads in HEADS for separate in (False, True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_is_that_of_one_process(ranks: int) -> None:
    by_rank = on_ranks(attention_errors, ranks, CASES, "cpu", torch.float64, LENGTH, 8)
    for rank, found in enumerate(by_rank):
        for case, errors in zip(CASES, found, strict=True):
            for name, error, _ in errors:
                assert error < 1e-13, f"rank {rank}, {case}: {name}"


def once_rounded(world: World, kind: str, dtype: torch.dtype) -> dict[str, float]:
    """How far beyond one rounding a rank is off, of the largest entry, in the result and in every gradient.

    With kernels that give each block in float32: torch's own on the CPU have rounded it already.
    """
    ranks, group = world.size, dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 2, 4, LENGTH, 8, generator=generator).to(dtype)
    mine = [zigzag.local_part(torch.arange(LENGTH), rank, ranks) for rank in range(ranks)]
    query, key, value, grad = whole[:, :, :, mine[world.rank]].contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "cpu_attention", partial_attention._in_tiles)
        patch.setattr(compat, "cpu_attention_backward", partial_attention._in_tiles_backward)
        out, lse = ring_attention(query, key, value, [], kind, group.group_name)
        grads = ring_attention_backward(grad, query, key, value, out, lse, [], kind, group.group_name)
    everywhere = [torch.empty_like(out) for _ in range(ranks)]
    dist.all_gather(everywhere, out.contiguous())
    result = torch.empty_like(whole[0])
    for places, part in zip(mine, everywhere, strict=True):
        result[:, :, places] = part
    q, k, v, g = whole.double()
    exact, exact_lse = partial_attention._in_tiles(q, k, v, True)
    exact_grads = partial_attention._in_tiles_backward(g, q, k, v, result.double(), exact_lse, True)
    found = {"result": (out, exact), "query": (grads[0], exact_grads[0])}
    found |= {"key": (grads[1], exact_grads[1]), "value": (grads[2], exact_grads[2])}
    rounding = torch.finfo(dtype).eps / 2
    off = (lse - exact_lse[:, :, mine[world.rank]]).abs()
    excess = {"log-sum-exp": float(off.max() / exact_lse.abs().max())}
    for name, (part, true) in found.items():
        here = true[:, :, mine[world.rank]]
        off = (part - here).abs() - rounding * here.abs()
        excess[name] = float(off.max() / here.abs().max())
    return excess


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["ring", "allgather"])
def test_blocks_are_added_up_in_float32_and_rounded_once(kind: str, dtype: torch.dtype) -> None:
    for found in on_ranks(once_rounded, 4, kind, dtype):
        for name, excess in found.items():
            assert excess < 16 * 2**-24, name


# --- kernels that only a GPU has, played on the CPU --------------------------------------------------------


def played_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    longest: tuple[int, int],
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """What the flash kernel for many lengths does, but for NaN where a sequence has no keys."""
    repeats = query.shape[1] // key.shape[1]
    out = torch.full_like(query, torch.nan)
    lse = torch.full(query.shape[1::-1], torch.nan, dtype=query.dtype)
    for q, k in zip(pairwise(of_queries.tolist()), pairwise(of_keys.tolist()), strict=True):
        queries, keys = slice(*q), slice(*k)
        if q[0] < q[1] and k[0] < k[1]:
            qs = query[queries].transpose(0, 1)[None]
            ks, vs = (x[keys].transpose(0, 1)[None].repeat_interleave(repeats, 1) for x in (key, value))
            part, weight = partial_attention._in_tiles(qs, ks, vs, causal)
            out[queries], lse[:, queries] = part[0].transpose(0, 1), weight[0]
    return out, lse


def played_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    longest: tuple[int, int],
    causal: bool,
) -> tuple[Tensor, ...]:
    repeats = query.shape[1] // key.shape[1]
    grads = tuple(torch.full_like(x, torch.nan) for x in (query, key, value))
    for q, k in zip(pairwise(of_queries.tolist()), pairwise(of_keys.tolist()), strict=True):
        queries, keys = slice(*q), slice(*k)
        if q[0] < q[1] and k[0] < k[1]:
            g, qs, o = (x[queries].transpose(0, 1)[None] for x in (grad, query, out))
            ks, vs = (x[keys].transpose(0, 1)[None].repeat_interleave(repeats, 1) for x in (key, value))
            parts = partial_attention._in_tiles_backward(g, qs, ks, vs, o, lse[None, :, queries], causal)
            grads[0][queries] = parts[0][0].transpose(0, 1)
            for whole, part in zip(grads[1:], parts[1:], strict=True):
                whole[keys] = part[0].unflatten(0, (-1, repeats)).sum(1).transpose(0, 1)
    return grads


class CudnnPlayed:
    """cuDNN's kernels: fewer key heads than query heads, any order but of the numbers of a head.

    plans  of what orders in memory gradients and results were, for the shapes and orders of query, key and
           value: torch keeps the first one's
    """

    def __init__(self) -> None:
        self.calls = 0
        self.plans: dict[Any, set[Any]] = {}

    def instead(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(compat, "has_cudnn_attention", lambda query, key, value: True)
        patch.setattr(compat, "cudnn_attention", self.forward)
        patch.setattr(compat, "cudnn_attention_backward", self.backward)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        self.calls += 1
        assert all(x.stride(3) == 1 for x in (query, key, value))
        repeats = query.shape[1] // key.shape[1]
        wide = (x.repeat_interleave(repeats, 1) for x in (key, value))
        out, lse = partial_attention._in_tiles(query, *wide, causal)
        return torch.empty_like(query).copy_(out), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        assert lse.is_contiguous()
        shapes = tuple((x.shape, x.stride()) for x in (query, key, value))
        self.plans.setdefault((shapes, causal), set()).add((grad.stride(), out.stride()))
        repeats = query.shape[1] // key.shape[1]
        wide = (x.repeat_interleave(repeats, 1) for x in (key, value))
        of_query, *others = partial_attention._in_tiles_backward(grad, query, *wide, out, lse, causal)
        of_key, of_value = (x.unflatten(1, (-1, repeats)).sum(2) for x in others)
        return of_query, of_key, of_value


@pytest.mark.parametrize("tile", [3, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_every_kernel_gives_the_same(
    causal: bool, separate: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_attention, "TILE", tile)
    torch.manual_seed(0)
    length, keys = 12, 12 if causal else 7
    query, grad = torch.randn(2, 2, 4, length, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, keys, 8, dtype=torch.float64)
    limits = None
    if separate:
        limits = torch.tensor([0, 5, 12, 13, 24, 24, 24]).int() if causal else torch.tensor([[4, 3], [0, 0]])

    def run() -> list[Tensor]:
        out, lse = partial_attention.attend(Block(query, key, value, causal, limits))
        # Other blocks have added to the result; only the gradients of this one are asked for.
        whole, weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double(), lse + 0.5
        weight = weight.where(weight.isfinite(), 0.0)
        block = Block(query, key, value, causal, limits)
        grads = partial_attention.attend_backward(block, grad, whole, weight)
        return [out, lse, *grads]

    expected = run()
    monkeypatch.setattr(compat, "cpu_attention", partial_attention._in_tiles)
    monkeypatch.setattr(compat, "cpu_attention_backward", partial_attention._in_tiles_backward)
    torch.testing.assert_close(run(), expected, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(partial_attention, "_has_flash", lambda query: True)
    monkeypatch.setattr(compat, "gpu_attention", played_forward)
    monkeypatch.setattr(compat, "gpu_attention_backward", played_backward)
    torch.testing.assert_close(run(), expected, rtol=1e-12, atol=1e-12)
    played = CudnnPlayed()
    played.instead(monkeypatch)
    torch.testing.assert_close(run(), expected, rtol=1e-12, atol=1e-12)
    assert played.calls == (0 if separate else 2)  # it knows no documents


def test_cudnn_s_operators_take_what_they_are_given() -> None:
    """As torch describes them to compilers; what they compute, a GPU shows."""
    query = torch.empty(2, 12, 8, 16, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    key, value = (
        torch.empty(5, 2, 2, 4, 16, device="meta", dtype=torch.bfloat16).permute(1, 2, 3, 0, 4).unbind()
    )
    out, lse = compat.cudnn_attention(query, key, value, False)
    assert (out.shape, out.stride(), lse.shape) == (query.shape, query.stride(), query.shape[:3])
    grads = compat.cudnn_attention_backward(out, query, key, value, out, lse, False)
    assert [x.shape for x in grads] == [x.shape for x in (query, key, value)]


def calls_of_cudnn(world: World, kind: str) -> tuple[int, int, set[int], float]:
    """Forward's and backward's calls, how many plans each needs, and the largest error of a gradient.

    Gradients come in one order, and in another.
    """
    ranks, group = world.size, dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    mine = [zigzag.local_part(torch.arange(LENGTH), rank, ranks) for rank in range(ranks)][world.rank]
    query, grad = torch.randn(2, 2, 4, LENGTH, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, LENGTH, 8, generator=generator, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    AttentionCore()(*leaves, Context(None)).backward(grad)
    local = [x[:, :, mine].contiguous() for x in (query, key, value)]
    played, name, off, calls = CudnnPlayed(), group.group_name, 0.0, [0]
    with pytest.MonkeyPatch.context() as patch:
        played.instead(patch)
        for by_token in (True, False):
            some = grad[:, :, mine]
            some = some.transpose(1, 2).contiguous().transpose(1, 2) if by_token else some.contiguous()
            out, lse = ring_attention(*local, [], kind, name)
            calls.append(played.calls)
            grads = ring_attention_backward(some, *local, out, lse, [], kind, name)
            calls.append(played.calls)
            for leaf, part in zip(leaves, grads, strict=True):
                assert leaf.grad is not None
                off = max(off, float((part - leaf.grad[:, :, mine]).abs().max()))
    return calls[1], calls[2] - calls[1], {len(orders) for orders in played.plans.values()}, off


@pytest.mark.parametrize("kind", ["ring", "allgather"])
def test_whole_blocks_are_few_calls_with_one_plan_each(kind: str) -> None:
    """Under ring one call a block; gathered blocks are one of earlier and one of later ranks, and its own."""
    ranks = 4
    for rank, (forward, backward, plans, off) in enumerate(on_ranks(calls_of_cudnn, ranks, kind)):
        expected = ranks if kind == "ring" else 1 + (rank > 0) + (rank < ranks - 1)
        assert (forward, backward, plans) == (expected, expected, {1})
        assert off < 1e-13


# --- the whole model ---------------------------------------------------------------------------------------


def model_case(name: str, ranks: int, kind: str, spec: dict[str, Any] = SPEC, **training: Any) -> Case:
    training = {"seq_len": LENGTH, "global_batch": 4, "micro_batch": 2} | training
    return Case(f"{kind} {name}", ranks, {"cp": ranks, "cp_kind": kind}, training, spec=spec)


def model_cases(ranks: int) -> list[Case]:
    found = []
    for kind in KINDS:
        for name, spec in (("rope", SPEC), ("learned", TIED), ("one key head", MQA)):
            found.append(model_case(name, ranks, kind, spec))
        if ranks == 2:
            for mode in ("full", "every-3", "sqrt", "selective"):
                found.append(model_case(f"recompute {mode}", ranks, kind, recompute=mode, micro_batch=4))
            found.append(model_case("bf16", ranks, kind, precision="bf16"))
    found.append(model_case("window", ranks, "ulysses", SPEC | {"sliding_window": 5}))
    return found


def micro_batch_of(job: Job, number: int) -> dict[str, Tensor | None]:
    """Every third one is of whole sequences, the others of packed documents."""
    assert job.training.micro_batch is not None
    generator = torch.Generator().manual_seed(number)
    shape = (job.training.micro_batch, job.training.seq_len)
    tokens, targets = torch.randint(0, job.spec.vocab_size, (2, *shape), generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.1] = -100
    documents = None if number % 3 == 1 else packed(*shape, seed=number)
    boundaries = None if documents is None else document_boundaries(documents)
    return {"tokens": tokens, "targets": targets, "documents": documents, "boundaries": boundaries}


def model_on(device: str, job: Job) -> Decoder:
    with torch.device(device):
        return Decoder(job.spec).to(torch.bfloat16 if job.training.precision == "bf16" else torch.float64)


def step(world: Any, jobs: list[Job]) -> list[dict[str, Any]]:
    """What one step of each job sends."""
    found = []
    for job in jobs:
        mesh = mesh_of(Layout.of(job))
        model = model_on("meta", job)
        context_split.split(model, mesh, job)
        apply_recompute(model, job.training.recompute)
        model.to_empty(device="cpu")
        initialise(model, job.spec, seed=1)
        with MessageTracer(mesh) as tracer:
            for number in range(int(Setup.of(job).micro_batches)):
                model(**local_inputs(micro_batch_of(job, number), mesh.place, job)).backward()
        found.append({"traffic": tracer.traffic(), "place": mesh.place})
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_what_the_ledger_says(ranks: int) -> None:
    cases = [(case, case.job()) for case in model_cases(ranks)]
    by_rank = on_ranks(step, ranks, [job for _, job in cases])
    for number, (case, job) in enumerate(cases):
        assert check(job, [context]) == []
        for found in (results[number] for results in by_rank):
            assert found["traffic"] == passes(job, found["place"], "cp").traffic(), case.name


# --- memory ------------------------------------------------------------------------------------------------


def saved_bytes(model: Decoder, inputs: dict[str, Tensor | None]) -> int:
    """Bytes that the first block keeps for backward, its parameters not counted."""
    tokens = inputs["tokens"]
    assert tokens is not None
    x = torch.randn(*tokens.shape, model.spec.dim, dtype=torch.float64, requires_grad=True)
    positions = inputs.get("positions")
    positions = torch.arange(tokens.shape[1]) if positions is None else positions
    about = model.make_context(x, positions, None, None)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.blocks["0"](x, about)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    out.sum().backward()
    return sum(kept.values())


def memory(world: Any, jobs: list[Job]) -> list[tuple[int, int]]:
    """What one block keeps on one process, and here."""
    found = []
    for job in jobs:
        mesh = mesh_of(Layout.of(job))
        inputs = micro_batch_of(job, 1)
        plain, split = model_on("cpu", job), model_on("cpu", job)
        context_split.split(split, mesh, job)
        found.append((saved_bytes(plain, inputs), saved_bytes(split, local_inputs(inputs, mesh.place, job))))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_share_of_the_sequence(ranks: int) -> None:
    """Torch's CPU kernel and ulysses keep the result of attention twice, by head and by token; ours once."""
    spec = SPEC | {"heads": 4, "kv_heads": 4}
    jobs = [model_case("memory", ranks, kind, spec).job() for kind in KINDS]
    result = 2 * LENGTH * SPEC["dim"] * 8
    for found in on_ranks(memory, ranks, jobs):
        for kind, (whole, here) in zip(KINDS, found, strict=True):
            assert here * ranks == whole - (0 if kind == "ulysses" else result), kind


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "training", "spec", "key", "words"),
    [
        ("ring", {"seq_len": 18}, {}, "training.seq_len", ("18", "2 x 2", "16 or 20")),
        ("allgather", {"seq_len": 18}, {}, "training.seq_len", ("18", "2 x 2", "16 or 20")),
        ("ulysses", {"seq_len": 17}, {}, "training.seq_len", ("17", "16 or 18")),
        (
            "ulysses",
            {},
            {"heads": 5, "kv_heads": 1, "head_dim": 8},
            "layout.cp",
            ("5 heads", "'ring'", "4 or 6"),
        ),
        ("ring", {}, {"sliding_window": 8}, "layout.cp_kind", ("'ulysses'", "model.sliding_window = 8")),
        (
            *("ring", {}, {"sliding_window": 8, "full_attention_every": 2}),
            *("layout.cp_kind", ("'ulysses'", "model.sliding_window = 8")),
        ),
        (
            *("allgather", {}, {"attention_softcap": 50.0}),
            *("layout.cp_kind", ("'allgather' with model.attention_softcap = 50.0", "'ulysses'")),
        ),
    ],
)
def test_impossible_splits_name_the_number_to_change(
    kind: str, training: dict[str, Any], spec: dict[str, Any], key: str, words: tuple[str, ...]
) -> None:
    (problem,) = check(model_case("bad", 2, kind, SPEC | spec, **training).job(), [context])
    assert problem.key == key
    for word in words:
        assert word in str(problem)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_rank_s_part_has_strides_of_its_own(kind: str, rows: int) -> None:
    """Torch's pipeline compares strides, those of a single row too."""
    job = model_case("", 2, kind, SPEC).job()
    batch = {"tokens": torch.arange(rows * LENGTH).view(rows, LENGTH), "targets": None}
    for rank in range(2):
        tokens = local_inputs(batch, Place(cp=rank), job)["tokens"]
        assert tokens is not None
        assert tokens.stride() == (LENGTH // 2, 1)


def test_heads_are_counted_after_tensor_ranks_have_taken_theirs() -> None:
    layout = {"cp": 2, "tp": 4, "cp_kind": "ulysses"}
    (problem,) = check(Case("tp", 8, layout, {"seq_len": LENGTH}).job(), [context])
    assert "4 heads" in problem.message
    assert "layout.tp = 4" in problem.message
    assert "layout.cp = 1" in problem.hint


def test_windows_as_long_as_the_sequence_and_no_context_ranks_are_fine() -> None:
    assert check(model_case("wide", 2, "ring", SPEC | {"sliding_window": LENGTH}).job(), [context]) == []
    job = Case("alone", training={"seq_len": 17}).job()
    assert check(job, [context]) == []
    batch = micro_batch_of(job, 0)
    assert local_inputs(batch, Place(), job) == batch
    assert passes(job, Place(), "cp") == Ledger()
