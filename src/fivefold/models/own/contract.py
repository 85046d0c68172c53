"""A user's model looked over before any rank starts: its numbers, or all that is wrong with it.

It is built and run on torch's meta device, where tensors have shapes and no values: that takes milliseconds
and no memory, whatever the model's size.
"""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from fivefold.models.own.reference import KEY, found, place_of
from fivefold.models.own.spec import OwnSpec, part_of
from fivefold.problems import BadInput, Problem, refuse

ROWS, LENGTH = 2, 8
"""The batch that a model is tried with; a job tries its own sequence length."""

ANY_LENGTH = 2**31
"""The longest sequence of a model that does not say `max_seq_len`."""

SEVERAL_DTYPES = (torch.float64, torch.bfloat16)
"""`verify` computes in float64 and training in others: a model that fixes one fails in another."""


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


@cache
def inspected(reference: str, length: int = LENGTH) -> OwnSpec:
    """What there is to know of the model that `reference` names. Raises `BadInput`.

    length  of the sequences it is tried with, if it takes such long ones
    """
    with torch.device("meta"):
        model = made(reference)
    refuse(_part_problems(model))
    refuse([*_tensor_problems(model), *_layer_problems(model)])
    longest = int(getattr(model, "max_seq_len", ANY_LENGTH))
    for dtype in SEVERAL_DTYPES:
        dim, vocab_size = _tried(model.to(dtype), min(length, longest), dtype)
    return OwnSpec(
        name=type(model).__name__,
        module=reference,
        vocab_size=vocab_size,
        dim=dim,
        layers=len(model.blocks),
        max_seq_len=longest,
        tensors=tuple((name, tuple(p.shape)) for part in _parts(model) for name, p in _named(model, part)),
        takes_documents=takes_documents(model.blocks[0]),
    )


def made(reference: str) -> Any:
    """A new model, by calling what `reference` names. Raises `BadInput`."""
    make = found(reference)
    try:
        model = make()
    except Exception as error:
        message = f"'{reference}' cannot be built: {type(error).__name__}: {error} ({place_of(error)})"
        hint = (
            "It is called without arguments, and first on torch's meta device, "
            "where tensors have a shape but no values."
        )
        raise BadInput([Problem(KEY, message, hint)]) from error
    if not isinstance(model, nn.Module):
        hint = "It must return a torch.nn.Module with embedding, blocks and head."
        raise BadInput([Problem(KEY, f"'{reference}' made {_kind(model)}", hint)])
    return model


def takes_documents(block: nn.Module) -> bool:
    """Whether a block's forward has an argument called `documents`."""
    return "documents" in inspect.signature(block.forward).parameters


# --- what it is made of ------------------------------------------------------------------------------------


def _part_problems(model: Any) -> Iterator[Problem]:
    for name, meaning in (
        ("embedding", "a module: tokens [B, S] -> x [B, S, dim]"),
        ("blocks", "a torch.nn.ModuleList of modules: x [B, S, dim] -> [B, S, dim]"),
        ("head", "a module: x [B, S, dim] -> logits [B, S, vocabulary]"),
    ):
        part = getattr(model, name, None)
        if part is None:
            yield _problem(f"the model has no `{name}`", f"It must be {meaning}.")
        elif name == "blocks" and not isinstance(part, nn.ModuleList):
            yield _problem(f"`blocks` is {_kind(part)}", f"It must be {meaning}.")
        elif name == "blocks" and len(part) == 0:
            yield _problem("`blocks` is empty", "A model has at least one block.")
        elif not isinstance(part, nn.Module):
            yield _problem(f"`{name}` is {_kind(part)}", f"It must be {meaning}.")


def _tensor_problems(model: Any) -> Iterator[Problem]:
    parts = _parts(model)
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.split(".")[0] not in ("embedding", "blocks", "head"):
            yield _problem(
                f"the parameter '{name}' belongs to none of embedding, blocks and head",
                "Only these three are trained: move it into the one that uses it.",
            )
        elif first_name.setdefault(id(parameter), name) != name:
            yield _problem(
                f"'{name}' is the same parameter as '{first_name[id(parameter)]}'",
                "Shared (tied) weights are not supported: parts may live on different ranks. "
                "Give each its own.",
            )
        elif not parameter.requires_grad:
            yield _problem(f"the parameter '{name}' is frozen", "Every parameter is trained; use a buffer.")
        elif parameter.dim() == 0 or parameter.numel() == 0:
            hint = "Parameters are split along their first dimension: give it one, such as [1]."
            yield _problem(f"the parameter '{name}' has the shape {list(parameter.shape)}", hint)
    for part in parts:
        if not list(_named(model, part)):
            yield _problem(f"`{part}` has no parameters", "Put what it does into the part beside it.")
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                hint = f"It would never get values: use self.register_buffer('{key}', ..., persistent=False)."
                yield _problem(f"'{name}.{key}' is a plain tensor".replace("'.", "'"), hint)


def _layer_problems(model: Any) -> Iterator[Problem]:
    """What would make one rank compute something else than another."""
    for name, module in model.named_modules():
        rate = _dropout(module)
        if rate > 0:
            hint = "Another split, or a resumed run, would drop other numbers: set it to 0."
            yield _problem(f"'{name}' drops numbers by chance ({type(module).__name__}, {rate:g})", hint)
        if isinstance(module, BATCH_NORMS):
            hint = "Its statistics would differ between ranks, which see different sequences: use LayerNorm."
            yield _problem(f"'{name}' is {type(module).__name__}", hint)
    blocks = {str(number): takes_documents(block) for number, block in enumerate(model.blocks)}
    if len(set(blocks.values())) == 2:
        odd = next(number for number, takes in blocks.items() if takes != blocks["0"])
        hint = "Let the forward of all of them have an argument `documents`, or of none."
        yield _problem(f"of blocks.0 and blocks.{odd} only one takes documents", hint)


def _dropout(module: nn.Module) -> float:
    if isinstance(module, DROPOUTS):
        return float(module.p)
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention) else 0.0


# --- what it computes --------------------------------------------------------------------------------------


def _tried(model: Any, length: int, dtype: torch.dtype) -> tuple[int, int]:
    """(dim, vocabulary), found by running every part on tokens [2, length], forward and backward."""
    tokens = torch.zeros(ROWS, length, dtype=torch.int64, device="meta")
    tried = f"on tokens {list(tokens.shape)} in {_short(dtype)}"
    tables = _fed_with(tokens, model.embedding)
    x = _run("embedding", model.embedding, tried, tokens)
    if x.dim() != 3 or x.shape[:2] != tokens.shape:
        hint = f"It must return [B, S, dim]: here [{ROWS}, {length}, dim]."
        raise BadInput([_problem(f"`embedding` returned {list(x.shape)} {tried}", hint)])
    if x.dtype != dtype:
        hint = "It must return the dtype of its weights: pipelines send it on as it is."
        raise BadInput([_problem(f"`embedding` returned {_short(x.dtype)} {tried}", hint)])
    dim = x.shape[2]
    for number, block in enumerate(model.blocks):
        for documents in (None, tokens) if takes_documents(block) else (None,):
            given = {"documents": documents} if takes_documents(block) else {}
            y = _run(f"blocks.{number}", block, tried, x, **given)
        if y.shape != x.shape:
            hint = f"A block must return the shape that it is given: here {list(x.shape)}."
            raise BadInput([_problem(f"`blocks.{number}` returned {list(y.shape)} {tried}", hint)])
        if y.dtype != dtype:
            hint = "A block must return the dtype that it is given: pipelines send it on as it is."
            raise BadInput([_problem(f"`blocks.{number}` returned {_short(y.dtype)} {tried}", hint)])
        x = y
    logits = _run("head", model.head, tried, x)
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        hint = f"It must return [B, S, vocabulary]: here [{ROWS}, {length}, vocabulary]."
        raise BadInput([_problem(f"`head` returned {list(logits.shape)} {tried}", hint)])
    for table in tables:
        if table.num_embeddings < logits.shape[2]:
            message = f"`embedding` looks up {table.num_embeddings} tokens, `head` predicts {logits.shape[2]}"
            raise BadInput([_problem(message, "Both must know the same vocabulary.")])
    return dim, logits.shape[2]


def _fed_with(tokens: Tensor, embedding: nn.Module) -> list[nn.Embedding]:
    """The tables in which `tokens` are looked up, once the embedding has run.

    Without values nothing notices that a token is not in them.
    """
    fed: list[nn.Embedding] = []

    def note(table: nn.Module, given: tuple[Any, ...]) -> None:
        if given and given[0] is tokens:
            fed.append(cast(nn.Embedding, table))

    for module in embedding.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(note)
    return fed


def _run(name: str, part: nn.Module, tried: str, x: Tensor, **given: Tensor | None) -> Tensor:
    """A part's result, of which all its parameters take part.

    Its input is a leaf of the graph, which torch does not let it change in place.
    """
    entered = x.detach().requires_grad_() if x.is_floating_point() else x
    try:
        result = part(entered, **given)
    except Exception as error:
        if "in-place operation" in str(error):
            hint = "The part before it needs its output for its gradients: write x = x + y, not x += y."
            raise BadInput([_problem(f"`{name}` changes its input in place", hint)]) from error
        message = f"`{name}` failed {tried}: {type(error).__name__}: {error} ({place_of(error)})"
        hint = (
            "Make tensors with the dtype and on the device of the input. "
            "Parts are tried on torch's meta device, where tensors have a shape but no values."
        )
        raise BadInput([_problem(message, hint)]) from error
    if not isinstance(result, Tensor):
        raise BadInput([_problem(f"`{name}` returned {_kind(result)} {tried}", "It must return one tensor.")])
    named = dict(part.named_parameters(prefix=name))
    gradients = torch.autograd.grad(result.sum(), list(named.values()), allow_unused=True)
    hint = "Every parameter must take part in every forward: leave out what is not used."
    refuse(
        _problem(f"the parameter '{parameter}' does not change what `{name}` returns", hint)
        for parameter, gradient in zip(named, gradients, strict=True)
        if gradient is None
    )
    return result


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(model: Any) -> list[str]:
    return ["embedding", *(f"blocks.{number}" for number in range(len(model.blocks))), "head"]


def _named(model: nn.Module, part: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if part_of(name) == part]


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _problem(message: str, hint: str) -> Problem:
    return Problem(KEY, message, hint)
