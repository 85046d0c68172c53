"""Muon: the rule against a plain one, and every layout against one process."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fivefold.axes.muon import exchange_bytes
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.problems import BadInput
from fivefold.storage.folder import verified
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, load_latest
from fivefold.training.updates import muon as muon_rule
from fivefold.training.updates.muon import Muon
from fivefold.training.updates.newton_schulz import orthogonalised
from fivefold.training.updates.stochastic import half, key_of, random_words, rounded
from fivefold.verification import gradient_error
from tests.axes.layouts import SPECS, Split, split
from tests.cases import Case, batches, built_on_cpu, save
from tests.ranks import on_ranks
from tests.traced import Watch
from tests.training.test_own_model import OWN
from tests.training.test_own_model import case as own_case

STEPS, CLIP = 3, 0.1
MUON: dict[str, Any] = {"name": "muon", "momentum": 0.9, "weight_decay": 0.3, "lr": 1e-2}
RATES = (1e-2, 3e-2, 1e-3)


# --- the rule ----------------------------------------------------------------------------------------------


def plain_orthogonalised(matrix: Tensor) -> Any:
    """As written down by Muon's authors, of one matrix."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Plain:
    """Muon of one parameter, entry by entry where it is a stack."""

    def __init__(self, weight: Tensor):
        self.weight = weight.detach().clone()
        self.momentum = torch.zeros_like(self.weight)

    def step(self, gradient: Tensor, lr: float) -> None:
        mu, decay = MUON["momentum"], MUON["weight_decay"]
        self.momentum = mu * self.momentum + gradient
        wanted = gradient + mu * self.momentum
        entries = wanted if wanted.dim() == 3 else wanted[None]
        result = torch.stack([plain_orthogonalised(entry) for entry in entries]).view_as(wanted)
        scale = 0.2 * math.sqrt(max(wanted.shape[-2:]))
        self.weight = self.weight - lr * decay * self.weight - lr * scale * result


def given(masters: list[Tensor], seed: int) -> list[Tensor]:
    """Gradients, of sizes far from each other."""
    generator = torch.Generator().manual_seed(seed)
    found = [
        torch.randn(m.shape, generator=generator, dtype=torch.float64) * 10 ** (i % 5 - 2)
        for i, m in enumerate(masters)
    ]
    for master, gradient in zip(masters, found, strict=True):
        master.grad = gradient.to(master.dtype).clone()
    return found


def small(spec: str = "tied", **training: Any) -> Built:
    case = Case("small", training=training, optimizer=MUON, spec=SPECS[spec] | {"layers": 2})
    return build(case.job(), torch.device("cpu"))


@pytest.mark.parametrize("spec", ["tied", "experts"])
def test_several_steps_are_those_of_the_plain_rule(spec: str) -> None:
    built = small(spec)
    masters, names = built.weights.masters, built.weights.names
    ours = [i for i, name in enumerate(names) if set(built.optimizer.state()[name]) == {"momentum_buffer"}]
    plain = {index: Plain(masters[index]) for index in ours}
    others = [m.detach().clone().requires_grad_() for m in masters]
    adamw = torch.optim.AdamW(
        [{"params": [m], "weight_decay": 0.3 * (m.dim() >= 2)} for m in others],
        betas=(0.9, 0.95),
        foreach=False,
    )
    for number, lr in enumerate(RATES):
        gradients = given(masters, number)
        given(others, number)
        built.optimizer.step(lr)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for index, rule in plain.items():
            rule.step(gradients[index], lr)
        for index, name in enumerate(names):
            expected = plain[index].weight if index in plain else others[index].detach()
            torch.testing.assert_close(masters[index].detach(), expected, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("spec", ["tied", "experts", "one key", "parallel"])
def test_which_parameters_are_muons(spec: str) -> None:
    built = small(spec)
    states = built.optimizer.state()
    kinds = ("query", "key", "value", "output", "gate", "up", "down")
    wanted = {
        name
        for name in states
        if name.startswith("blocks.") and name.split(".")[-2] in kinds and name.endswith("weight")
    }
    assert {name for name, kept in states.items() if set(kept) == {"momentum_buffer"}} == wanted
    assert all(set(states[name]) == {"exp_avg", "exp_avg_sq", "step"} for name in states.keys() - wanted)


# --- momentum in 16 bits -----------------------------------------------------------------------------------


def narrow(states: str) -> Built:
    case = Case(
        "narrow", training={"precision": "fp32"}, optimizer=MUON | {"states": states}, spec=SPECS["experts"]
    )
    return build(case.job(), torch.device("cpu"))


def momenta(built: Built) -> dict[str, Tensor]:
    states = built.optimizer.state()
    return {name: kept["momentum_buffer"] for name, kept in states.items() if "momentum_buffer" in kept}


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_momentum_in_16_bits_is_rounded_by_seed_update_and_parameter(
    states: str, scale: float | None
) -> None:
    rounding = narrow(states)
    told = None if scale is None else torch.tensor(scale)
    expected = {name: torch.zeros(kept.shape) for name, kept in momenta(rounding).items()}
    assert all(kept.dtype == torch.bfloat16 for kept in momenta(rounding).values())
    for step, lr in enumerate(RATES, 1):
        masters, names = rounding.weights.masters, rounding.weights.names
        gradients = dict(zip(names, given(masters, step), strict=True))
        rounding.optimizer.step(lr, told)
        found = momenta(rounding)
        for name, before in expected.items():
            gradient = gradients[name].float() * (1.0 if told is None else told)
            exact = MUON["momentum"] * before + gradient
            words = random_words(torch.arange(exact.numel()), key_of(rounding.job.training.seed, step, name))
            wanted = rounded(exact.flatten(), half(words, 0)).view(exact.shape)
            assert torch.equal(found[name], wanted), (name, step)
            expected[name] = wanted.float()


def test_what_is_orthogonalised_is_gradient_and_momentum_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits as in 32, but for what rounding of the momentum before made of it."""
    seen: list[list[Tensor]] = []
    for states in ("fp32", "bf16"):
        built, taken = narrow(states), list[Tensor]()

        def looked_at(matrices: Tensor, taken: list[Tensor] = taken) -> Tensor:
            taken.append(matrices.clone())
            return torch.zeros_like(matrices)

        monkeypatch.setattr(muon_rule, "orthogonalised", looked_at)
        for step in (1, 2):
            given(built.weights.masters, step)
            built.optimizer.step(1e-2, torch.tensor(0.5))
        seen.append(taken)
    for exact, found in zip(*seen, strict=True):
        assert ((found - exact).norm() / exact.norm()) < 2.0**-8
    assert any(not torch.equal(exact, found) for exact, found in zip(*seen, strict=True))


# --- layouts -----------------------------------------------------------------------------------------------


def muon_case(case: Case, **training: Any) -> Job:
    more = {"clip": CLIP, "loss_scale": 64.0} | training
    return Case(
        case.name, case.ranks, case.layout, case.training | more, optimizer=MUON, spec=case.spec
    ).job()


def trained(world: World, job: Job) -> dict[str, Any]:
    """Clipped gradients of every step, weights and momenta after the last; matrices orthogonalised here."""
    built = built_on_cpu(job)
    used: list[dict[str, Tensor]] = []
    update = built.optimizer.step
    done: list[int] = []

    def counted(matrices: Tensor) -> Tensor:
        done.append(len(matrices))
        return orthogonalised(matrices)

    def updated(lr: float, scale: Tensor | None = None) -> None:
        gradients = [g if scale is None else g * scale for g in built.weights.collect_gradients()]
        used.append({n: g.double() for n, g in built.weights.whole(gradients).items()})
        update(lr, scale)

    built.optimizer.step = updated  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch, batches(job, built) as loader:
        patch.setattr(muon_rule, "orthogonalised", counted)
        losses = [built.step(next(loader), 1e-2, number).loss for number in range(1, STEPS + 1)]
    whole = built.weights.whole([m.detach() for m in built.weights.masters])
    return {
        "gradients": used,
        "weights": whole,
        "losses": losses,
        "done": sum(done),
        "stage": built.mesh.place.pp,
    }


@cache
def _alone(case: str) -> dict[str, Any]:
    training, spec = json.loads(case)
    return trained(None, muon_case(Case("one process", training=training, spec=spec)))  # type: ignore[arg-type]


def as_one_process(one: Split) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    alone = one.one_process()
    true = _alone(json.dumps([alone.training, alone.spec], sort_keys=True))
    return on_ranks(trained, one.ranks, muon_case(one.case())), true


LAYOUTS: list[tuple[Any, ...]] = [
    ("dense", {"dp_replicate": 2, "zero": 0}),
    ("tied", {"dp_shard": 2, "zero": 1}),
    ("dense", {"dp_shard": 2, "zero": 2}),
    ("dense", {"dp_shard": 2, "zero": 3}),
    ("tied", {"tp": 2}),
    ("dense", {"pp": 2}),
    ("experts", {"dp_shard": 2, "ep": 2, "zero": 3}),
    ("dense", {"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
    ("tied", {"cp": 2}),
    ("dense", {"dp_shard": 2, "tp": 2, "zero": 3}),
]
MORE: list[tuple[Any, ...]] = [
    ("one key", {"tp": 4}),
    ("experts", {"dp_shard": 4, "ep": 2, "zero": 3}),
    ("tied", {"dp_shard": 2, "pp": 2, "zero": 3}),
    ("tied", {"dp_shard": 4, "zero": 3}),
    ("dense", {"dp_shard": 3, "zero": 2}, {"global_batch": 12}),
    ("tied", {"dp_replicate": 2, "dp_shard": 2, "zero": 1}),
    ("dense", {"dp_replicate": 2, "tp": 2, "zero": 0}),
    ("tied", {"dp_replicate": 2, "pp": 2, "zero": 0}),
    ("tied", {"tp": 2, "pp": 2}),
    ("dense", {"cp": 2, "tp": 2, "zero": 1}),
    ("dense", {"cp": 2, "pp": 2}),
    ("dense", {"dp_shard": 2, "cp": 2, "zero": 3}),
    ("dense", {"pp": 2, "schedule": "zbv"}),
    ("tied", {"dp_shard": 2, "pp": 2, "zero": 2, "schedule": "interleaved"}),
    ("experts", {"cp": 2, "ep": 2, "zero": 0}),
    ("experts", {"dp_shard": 2, "zero": 3}),
    ("experts", {"dp_shard": 4, "ep": 4, "zero": 1}),
    ("experts", {"dp_shard": 2, "tp": 2, "ep": 2, "zero": 3}),
    ("experts", {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 2}),
    ("experts", {"dp_shard": 2, "pp": 2, "ep": 2, "zero": 3}),
    ("dense", {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "zero": 3}),
]
SPLITS = {one.name: one for one in (split("muon", *each) for each in (*LAYOUTS, *MORE))}
FAST = len(LAYOUTS)
NAMES = [pytest.param(n, id=n, marks=[pytest.mark.slow] * (i >= FAST)) for i, n in enumerate(SPLITS)]


@pytest.mark.parametrize("name", NAMES)
def test_as_one_process(name: str) -> None:
    """Clipped gradients and weights of every step; and each matrix is orthogonalised once, by one rank."""
    assert_same(*as_one_process(SPLITS[name]))


def assert_same(found: list[dict[str, Any]], true: dict[str, Any]) -> None:
    for step in range(STEPS):
        error, where = gradient_error(found[0]["gradients"][step], true["gradients"][step])
        assert error <= 1e-11, f"the gradient of {where} is off by {error:.1e} in step {step + 1}"
    for name, weight in true["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], weight, rtol=1e-11, atol=1e-11, msg=name)
    assert all(each["losses"] == pytest.approx(true["losses"], rel=1e-11) for each in found)
    assert sum(each["done"] for each in found) == true["done"]


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "zero": 3}, {"pp": 2, "schedule": "zbv"}])
def test_a_model_of_ones_own(layout: dict[str, Any]) -> None:
    found = on_ranks(trained, 2, muon_case(own_case("own", layout, 2)))
    true = trained(None, muon_case(OWN))  # type: ignore[arg-type]
    assert true["done"] > 0
    assert_same(found, true)


# --- saved and taken up ------------------------------------------------------------------------------------

SAVED, NEXT = 2, 2


def advanced(built: Built, start: int, end: int) -> list[float]:
    with batches(built.job, built, start) as loader:
        return [built.step(next(loader), 1e-2, step).grad_norm for step in range(start + 1, end + 1)]


def kept(built: Built) -> list[Tensor]:
    return [*built.weights.masters, *built.optimizer.tensors()]


def saved_and_gone_on(world: World, job: Job, run: Path) -> tuple[list[float], list[Tensor]]:
    built = built_on_cpu(job)
    advanced(built, 0, SAVED)
    save(built, run, Progress(SAVED, 0))
    return advanced(built, SAVED, SAVED + NEXT), [tensor.detach().clone() for tensor in kept(built)]


def taken_up(world: World, job: Job, run: Path) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
    built = built_on_cpu(job)
    progress, damaged = load_latest(built, run)
    assert progress is not None
    assert (progress.step, damaged) == (SAVED, [])
    curve = advanced(built, SAVED, SAVED + NEXT)
    weights = built.weights.whole([master.detach() for master in built.weights.masters])
    return curve, [tensor.detach().clone() for tensor in kept(built)], weights


RESUMED = [
    ("dense", {"dp_shard": 2, "zero": 3}, ("dense", {"tp": 2})),
    ("experts", {"dp_shard": 2, "ep": 2, "zero": 2}, ("experts", {"pp": 2})),
]


@pytest.mark.parametrize(("model", "layout", "other"), RESUMED)
def test_momentum_is_saved_and_resumed_bit_for_bit_and_goes_on_in_another_layout(
    model: str, layout: dict[str, Any], other: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    one = split("muon", model, layout)
    job = muon_case(one.case())
    before = on_ranks(saved_and_gone_on, one.ranks, job, tmp_path)
    manifest = verified(tmp_path / "checkpoints" / f"step-{SAVED}")
    assert "optimizer.blocks.0.attention.query.weight.momentum_buffer" in manifest.tensors
    assert "optimizer.blocks.0.attention.query.weight.exp_avg" not in manifest.tensors
    assert "optimizer.head.output.weight.exp_avg_sq" in manifest.tensors
    resumed = on_ranks(taken_up, one.ranks, job, tmp_path)
    for (curve, tensors), (again, taken, _) in zip(before, resumed, strict=True):
        assert curve == again
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, taken, strict=True))

    elsewhere = split("muon", *other)
    moved = on_ranks(taken_up, elsewhere.ranks, muon_case(elsewhere.case(), global_batch=one.batch), tmp_path)
    assert moved[0][0] == pytest.approx(before[0][0], rel=1e-9)
    for name, weight in resumed[0][2].items():
        torch.testing.assert_close(moved[0][2][name], weight, rtol=1e-9, atol=1e-11, msg=name)


def test_a_checkpoint_of_adamw_does_not_fit(tmp_path: Path) -> None:
    plain = Case("adamw").job()
    save(built_on_cpu(plain), tmp_path, Progress(SAVED, 0))
    with pytest.raises(BadInput, match="momentum_buffer' is absent there"):
        load_latest(built_on_cpu(muon_case(Case("muon"))), tmp_path)


# --- memory ------------------------------------------------------------------------------------------------


def peak_of_exchange(world: World, job: Job) -> tuple[int, int]:
    """Bytes that an exchange takes at the most beside gradients; and as the ledger has it."""
    built = built_on_cpu(job)
    rule = cast(Muon, built.optimizer.updates[0])
    gradients = {index: torch.randn_like(rule.masters[index]) for index in rule.held}
    pieces = {key: muon_rule._entry(gradients[index], number) for key, (index, number) in rule.mine.items()}
    watch = Watch()
    with watch:
        watch.see(*gradients.values())
        before = watch.now
        rule.exchange(pieces, orthogonalised, lambda key, result: None)
    return watch.peak - before, exchange_bytes(job, built.mesh.place)


@pytest.mark.parametrize(
    "layout", [{}, {"dp_shard": 2, "zero": 3}, {"dp_replicate": 2, "zero": 0}, {"tp": 2}]
)
def test_buffers_take_what_the_ledger_says(layout: dict[str, Any]) -> None:
    one = split("muon", "dense", layout)
    for found, expected in on_ranks(peak_of_exchange, one.ranks, muon_case(one.case())):
        assert 0.8 * expected <= found <= expected + 1024
