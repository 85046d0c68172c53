"""AdamW of our own: torch's formula, its moments rounded by chance, alike under every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fivefold.config import Optimizer as Settings
from fivefold.data.batch import Batch
from fivefold.training.build import Built, build
from fivefold.training.updates import operations
from fivefold.training.updates.adamw import MOMENTS, AdamW
from fivefold.training.updates.codes import decoded, encoded
from fivefold.training.updates.moments import widened
from fivefold.training.updates.operations import Numbers, Operands, adamw
from fivefold.training.updates.places import Places
from fivefold.training.updates.stochastic import half, key_of, random_words, rounded
from tests.cases import SPEC, TIED, Case, batches
from tests.training.updates.given import ADAMW, RATES, STATES, give_gradients, gradient_of

KEY = key_of(3, 5, "a")
STEP = 2.0**-7
"""The largest distance of two bfloat16, in their size."""
ROUNDOFF = 2.0**-24


def small(optimizer: dict[str, Any], precision: str = "fp32") -> Built:
    case = Case("small", training={"precision": precision}, optimizer=optimizer, spec=TIED | {"layers": 1})
    return build(case.job(), torch.device("cpu"))


def some(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(shape, generator=generator) for _ in range(4)]
    moments = (0.1 * draws[2]).to(dtype), (0.1 * draws[3].square()).to(dtype)
    return Operands(draws[0], draws[1], moments, None)


def copied(operands: Operands, dtype: torch.dtype | None = None) -> Operands:
    first, second = operands.moments
    copy = None if dtype is None else torch.zeros_like(operands.master, dtype=dtype)
    return Operands(operands.gradient, operands.master.clone(), (first.clone(), second.clone()), copy)


def whole(shape: tuple[int, ...]) -> Places:
    return Places.of_slab((0,) * len(shape), shape, shape)


# --- the formula -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_with_moments_in_float32_it_is_torchs_own(decay: float) -> None:
    """Over 50 updates: what is different is the last bit of each."""
    settings = Settings(**ADAMW | {"weight_decay": decay})
    ours, theirs = some((40, 30)), torch.nn.Parameter(some((40, 30)).master)
    ours = Operands(ours.gradient, ours.master, (torch.zeros(40, 30), torch.zeros(40, 30)), None)
    options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps, "weight_decay": decay}
    plain = torch.optim.AdamW([theirs], fused=True, **options)
    for count in range(1, 51):
        gradient = gradient_of("a", ours.master.shape, count)
        ours.gradient.copy_(gradient)
        theirs.grad = gradient
        plain.param_groups[0]["lr"] = lr = RATES[count % 4]
        plain.step()
        adamw(ours, Numbers.of(settings, lr, decay, count), None, whole((40, 30)), KEY)
    error = (ours.master - theirs.detach()).abs().max() / theirs.detach().abs().max()
    assert error < 1e-6
    for kind, moment in zip(MOMENTS, ours.moments, strict=True):
        torch.testing.assert_close(moment, plain.state[theirs][kind], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_one_update_from_moments_in_16_bits_is_that_of_float64(count: int) -> None:
    """The weight moves by the new moments as they were before they were rounded."""
    settings, lr, decay = Settings(**ADAMW), 1e-2, 0.3
    before, ours = some((64, 33)), some((64, 33))
    scale = torch.tensor(0.37)
    adamw(ours, Numbers.of(settings, lr, decay, count), scale, whole((64, 33)), KEY)
    g = before.gradient.double() * scale.double()
    m, v = (moment.double() for moment in before.moments)
    first, second = settings.betas
    m = first * m + (1 - first) * g
    v = second * v + (1 - second) * g * g
    divisor = (v / (1 - second**count)).sqrt() + settings.eps
    move = lr / (1 - first**count) * m / divisor
    w = (1 - lr * decay) * before.master.double() - move
    # Ten roundings lie between gradient and move, and three are of the weight. (m may have cancelled.)
    size = lr / (1 - first**count) * (first * before.moments[0].double().abs() + (1 - first) * g.abs())
    allowed = ROUNDOFF * (10 * size / divisor + 3 * before.master.double().abs())
    assert ((ours.master.double() - w).abs() <= allowed).all()
    for new, exact in zip(ours.moments, (m, v), strict=True):
        assert new.dtype == torch.bfloat16
        assert ((new.double() - exact).abs() <= (STEP + 8 * ROUNDOFF) * exact.abs() + 1e-7).all()
        assert (new.double() - exact).mean().abs() < 1e-4, "neither up nor down"
        assert (new != exact.bfloat16()).any(), "it is not the nearest"


def test_moments_are_rounded_by_the_words_of_their_places() -> None:
    """What is stored is the moment in float32, rounded by the words of these places."""
    settings = Settings(**ADAMW)
    operands = some((9, 8))
    first, second = (moment.float() for moment in operands.moments)
    exact = Operands(operands.gradient, operands.master.clone(), (first, second), None)
    places = Places.of_slab((3, 2), (9, 8), (20, 10))
    numbers = Numbers.of(settings, 1e-2, 0.3, 5)
    adamw(operands, numbers, None, places, KEY)
    adamw(exact, numbers, None, places, KEY)
    assert torch.equal(operands.master, exact.master)
    indices = torch.arange(200).view(20, 10)[3:12, 2:10].flatten()
    words = random_words(indices, KEY)
    for which, (stored, moment) in enumerate(zip(operands.moments, exact.moments, strict=True)):
        assert torch.equal(stored.flatten(), rounded(moment.flatten(), half(words, which)))


def test_a_slow_moment_follows_changes_that_are_too_small_for_16_bits() -> None:
    """Each of them is an eighth of a step: rounded to the nearest, the moment would stay where it is."""
    settings, shape, updates = Settings(betas=(0.9, 0.999)), (64, 32), 1500
    gradient = torch.full(shape, math.sqrt(2))
    moments = torch.ones(shape, dtype=torch.bfloat16), torch.ones(shape, dtype=torch.bfloat16)
    operands = Operands(gradient, torch.zeros(shape), moments, None)
    for count in range(1, updates + 1):
        numbers = Numbers.of(settings, 1e-3, 0.0, count)
        adamw(operands, numbers, None, whole(shape), key_of(0, count, "a"))
    assert moments[1].double().mean().item() == pytest.approx(2 - 0.999**updates, rel=0.002)


@pytest.mark.parametrize("count", [1, 40])
def test_one_update_from_codes_is_that_of_what_they_stand_for(count: int) -> None:
    """Weights move as from the same moments in float32, and these are stored, rounded by their words."""
    settings, places = Settings(**ADAMW), Places.of_slab((3, 2), (64, 32), (90, 40))
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randint(high, (64, 32), generator=generator).to(torch.uint8) for high in (127, 255)]
    kept = decoded(codes[0], codes[1])
    plain = some((64, 32))
    exact = Operands(plain.gradient, plain.master.clone(), (kept[0].clone(), kept[1].clone()), None)
    narrow = Operands(plain.gradient, plain.master.clone(), (codes[0].clone(), codes[1].clone()), None)
    for operands in (exact, narrow):
        adamw(operands, Numbers.of(settings, 1e-2, 0.3, count), torch.tensor(0.37), places, KEY)
    assert torch.equal(narrow.master, exact.master)
    words = random_words(places.indices(0, 64 * 32, torch.device("cpu")), KEY).view(64, 32)
    first, second = exact.moments
    for stored, wanted in zip(narrow.moments, encoded(first, second, words), strict=True):
        assert torch.equal(stored, wanted)


def test_slow_moments_in_8_bits_follow_changes_that_are_too_small_for_them() -> None:
    """In the mean: each update moves the second by a two hundredth of a step."""
    settings, shape, updates = Settings(betas=(0.9, 0.999)), (128, 64), 1500
    gradient = torch.full(shape, math.sqrt(2))
    moments = torch.full(shape, 89, dtype=torch.uint8), torch.full(shape, 225, dtype=torch.uint8)
    operands = Operands(gradient, torch.zeros(shape), moments, None)
    for count in range(1, updates + 1):
        numbers = Numbers.of(settings, 1e-3, 0.0, count)
        adamw(operands, numbers, None, whole(shape), key_of(0, count, "a"))
    first, second = decoded(*moments)
    assert second.double().mean().item() == pytest.approx(2 - 0.999**updates, rel=0.02)
    assert first.double().mean().item() == pytest.approx(math.sqrt(2), rel=0.005)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.uint8])
def test_the_size_of_blocks_changes_nothing(narrow: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, found = Settings(**ADAMW), []
    for size in (7, 1 << 18):
        monkeypatch.setattr(operations, "BLOCK", size)
        operands = copied(some((21, 13)), torch.bfloat16)
        if narrow == torch.uint8:
            operands = operands._replace(
                moments=encoded(*widened(*operands.moments), torch.zeros(21, 13).int())
            )
        adamw(operands, Numbers.of(settings, 1e-2, 0.3, 2), torch.tensor(0.5), whole((21, 13)), KEY)
        found.append([operands.master, *operands.moments, operands.copy])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]


# --- as an update rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_model_computes_with_the_new_weights(precision: str) -> None:
    built = small(STATES, precision)
    give_gradients(built, 1)
    built.optimizer.step(0.1)
    for parameter, master in zip(built.model.parameters(), built.weights.masters, strict=True):
        assert parameter.dtype != master.dtype
        assert torch.equal(parameter, master.to(parameter.dtype))


def test_the_first_step_is_torchs_but_for_what_is_stored() -> None:
    """Nothing has been rounded yet: weights are those of moments in float32, and only matrices decay."""
    ours, theirs = small(STATES), small(ADAMW)
    for built in (ours, theirs):
        give_gradients(built, 1)
        built.optimizer.step(0.1, torch.tensor(0.25))
    masters = zip(ours.weights.masters, theirs.weights.masters, strict=True)
    for name, (one, other) in zip(ours.weights.names, masters, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-6, atol=1e-7, msg=name)
    for name, kinds in ours.optimizer.state().items():
        assert kinds["exp_avg"].dtype == kinds["exp_avg_sq"].dtype == torch.bfloat16
        torch.testing.assert_close(
            kinds["exp_avg"].float(), theirs.optimizer.state()[name]["exp_avg"], rtol=2 * STEP, atol=0
        )


def test_gradients_are_scaled_once() -> None:
    """Told to scale them, it does what it does with gradients that have been."""
    told, given = small(STATES), small(STATES)
    scale = torch.tensor(0.3)
    for step, lr in enumerate(RATES, 1):
        for built in (told, given):
            give_gradients(built, step)
        for master in given.weights.masters:
            assert master.grad is not None
            master.grad.mul_(scale)
        told.optimizer.step(lr, scale)
        given.optimizer.step(lr)
    assert_same(told, given)


def assert_same(one: Built, other: Built) -> None:
    kept = [[*built.weights.masters, *built.optimizer.tensors()] for built in (one, other)]
    assert len(kept[0]) == 4 * len(one.weights.masters)
    for mine, theirs in zip(*kept, strict=True):
        assert torch.equal(mine, theirs)


def test_moments_are_rounded_by_seed_step_and_parameter() -> None:
    """Of each update the moments in float32, by the words of this seed, this step, and this parameter."""
    built = small(STATES)
    job, weights, update = built.job, built.weights, built.optimizer.update_of[0]
    for count, lr in enumerate(RATES[:3], 1):
        give_gradients(built, count)
        exact = []
        for index, (parameter, master) in enumerate(zip(weights.parameters, weights.masters, strict=True)):
            assert master.grad is not None
            states = update.states(index)
            first, second = (states[kind].float() for kind in MOMENTS)
            operands = Operands(master.grad, master.detach().clone(), (first, second), None)
            decay = job.optimizer.weight_decay * (parameter.dim() >= 2)
            adamw(operands, Numbers.of(job.optimizer, lr, decay, count), None, Places.of(parameter), KEY)
            exact.append(operands)
        built.optimizer.step(lr)
        for index, (name, operands) in enumerate(zip(weights.names, exact, strict=True)):
            key = key_of(job.training.seed, count, name)
            words = random_words(torch.arange(operands.master.numel()), key)
            assert torch.equal(weights.masters[index], operands.master)
            for which, kind in enumerate(MOMENTS):
                wanted = rounded(operands.moments[which].flatten(), half(words, which))
                assert torch.equal(update.states(index)[kind].flatten(), wanted), name


def test_some_masters_alone() -> None:
    """As a rule among others: it leaves those of other rules alone."""
    built, every = small(STATES, "bf16"), small(STATES, "bf16")
    before = [master.clone() for master in built.weights.masters]
    mine = [index for index in range(len(before)) if index % 3 == 1]
    update = AdamW(built.job, built.weights, mine, torch.bfloat16)
    give_gradients(built, 1)
    give_gradients(every, 1)
    update.step(0.1)
    every.optimizer.step(0.1)
    for index, (old, new) in enumerate(zip(before, built.weights.masters, strict=True)):
        wanted = every.weights.masters[index] if index in mine else old
        assert torch.equal(new, wanted)
    assert [bool(update.tensors_of(index)) for index in mine] == [True] * len(mine)


def test_weights_that_lie_transposed_in_memory() -> None:
    plain, other = small(STATES, "bf16"), small(STATES, "bf16")
    matrix = next(i for i, master in enumerate(other.weights.masters) if master.dim() == 2)
    for tensors in (other.weights.masters, other.weights.parameters):
        tensors[matrix].data = tensors[matrix].data.t().contiguous().t()
        assert not tensors[matrix].is_contiguous()
    for step, lr in enumerate(RATES, 1):
        for built in (plain, other):
            give_gradients(built, step)
            built.optimizer.step(lr)
    assert_same(plain, other)
    assert torch.equal(plain.weights.parameters[matrix], other.weights.parameters[matrix])


# --- what training sees ------------------------------------------------------------------------------------


def test_losses_in_fp32_are_those_of_torchs_own_adamw_to_the_last_bit() -> None:
    job = Case("torch", training={"precision": "fp32", "clip": 0.5, "micro_batch": 4}, spec=SPEC).job()
    ours, theirs = (build(job, torch.device("cpu")) for _ in range(2))
    parameters = list(theirs.model.parameters())
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    with batches(job, ours) as loader:
        for step in range(1, 21):
            given = next(loader)
            result = ours.step(given, 1e-2, step)
            tokens, total = sum(batch.valid for batch in given), torch.zeros(())
            for batch in given:
                loss = theirs.model(**theirs.step.inputs(batch)) / tokens
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            for group in plain.param_groups:
                group["lr"] = 1e-2
            plain.step()
            plain.zero_grad()
            assert result.loss == total.item(), step
            assert result.grad_norm == norm.item(), step
    assert norm > 0.5 or step == 20


@pytest.mark.slow
def test_it_learns_as_well_with_moments_in_fewer_bits() -> None:
    """The loss on sequences that were not trained on, after 300 steps."""
    found = {states: heldout(states) for states in ("fp32", "bf16", "int8")}
    assert found["fp32"] < 0.8 * math.log(SPEC["vocab_size"]), "it has learned something"
    assert len(set(found.values())) == 3
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.01)
    assert found["int8"] == pytest.approx(found["fp32"], rel=0.01)


def heldout(states: str) -> float:
    training = {"precision": "fp32", "global_batch": 8, "seq_len": 32}
    spec = SPEC | {"layers": 2}
    built = build(Case("chain", 1, {}, training, {"states": states}, spec).job(), torch.device("cpu"))
    for step in range(1, 301):
        built.step([chain(step, 8)], 1e-2 * min(1.0, step / 20, (301 - step) / 100), step)
    unseen = chain(0, 64)
    with torch.no_grad():
        return float(built.model(**built.step.inputs(unseen)) / unseen.valid)


def chain(seed: int, rows: int) -> Batch:
    """Sequences in which a token is followed by one of few, some more often than others."""
    size, length = SPEC["vocab_size"], 32
    follows = torch.rand(size, size, generator=torch.Generator().manual_seed(1)).pow(20)
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = [torch.randint(size, (rows,), generator=generator)]
    for _ in range(length):
        tokens.append(torch.multinomial(follows[tokens[-1]], 1, generator=generator)[:, 0])
    whole = torch.stack(tokens, dim=1)
    return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous(), None, rows * length)
