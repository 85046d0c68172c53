"""What a device is asked to compute, from the words of a command line; or why it cannot."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fivefold.bench.reached import DTYPES, SECONDS
from fivefold.comm.world import DeviceKind, device_kind
from fivefold.hardware.devices import GIBI
from fivefold.hardware.host_memory import available_memory
from fivefold.problems import Problem, did_you_mean, refuse

Needs = Callable[[str, int], float]
"""Bytes of memory that a dtype takes at a size."""
TF32_SINCE = (8, 0)
"""The compute capability of the first GPUs that have it: Ampere."""

MOST_DIGITS = 9


@dataclass(frozen=True)
class Asked:
    """Every dtype at every size, on a device, for that many seconds each."""

    device: DeviceKind
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float


def asked(
    device: DeviceKind | None,
    dtypes: str | None,
    sizes: tuple[str, str | None],
    seconds: float | None,
    usual: Mapping[DeviceKind, tuple[Sequence[str], Sequence[int]]],
    needs: Needs,
    *others: Problem,
) -> Asked:
    """What the words ask for. Raises `BadInput`, with `others` that were found before.

    sizes  the option's name and its words
    usual  dtypes and sizes where none are given; of these, those that fit into the memory
    """
    problems = list(others)
    if device == "cuda" and device_kind() != "cuda":
        hint = "Give --device cpu, or leave it out."
        problems.append(Problem("--device", "cuda, but torch sees no GPU here", hint))
    kind = kind_of(device)
    usual_dtypes, usual_sizes = usual[kind]
    option, words = sizes
    of_dtypes = [name for name in usual_dtypes if name != "tf32" or _has_tf32(kind)]
    if dtypes is not None:
        of_dtypes = _dtypes(dtypes, kind, problems)
    of_sizes = list(usual_sizes) if words is None else whole_numbers(words, option, problems)
    lasting = SECONDS[kind] if seconds is None else seconds
    problems += unmeasurable(lasting)
    free = _free_memory(kind)
    fitting = [size for size in of_sizes if all(needs(name, size) <= free for name in of_dtypes)]
    if words is not None or not fitting:
        problems += _too_large(option, of_sizes, fitting, of_dtypes, needs, free)
    refuse(problems)
    return Asked(kind, tuple(of_dtypes), tuple(fitting), lasting)


def kind_of(device: DeviceKind | None) -> DeviceKind:
    """What is measured: what was asked for, if it is there, or the best that is."""
    return "cpu" if device == "cpu" else device_kind()


def unmeasurable(seconds: float) -> list[Problem]:
    """Why `--seconds` cannot be that."""
    if 0 < seconds < math.inf:
        return []
    return [Problem("--seconds", f"{seconds:g} is no length of time", "Give a number above 0: 2, or 0.5.")]


def whole_numbers(text: str, option: str, problems: list[Problem]) -> list[int]:
    """Numbers above 0 with commas between them; what is none is added to `problems`."""
    words = [word.strip().replace("_", "") for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal() or len(word) > MOST_DIGITS or int(word) == 0]
    if wrong:
        hint = "Give whole numbers above 0, with commas between them: 512,1024,8192."
        problems.append(Problem(option, f"'{wrong[0]}' is no size", hint))
        return []
    return list(dict.fromkeys(map(int, words)))


def _dtypes(text: str, kind: DeviceKind, problems: list[Problem]) -> list[str]:
    names = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in DTYPES:
            hint = f"{did_you_mean(name, DTYPES)} With commas between them: bf16,fp32."
            problems.append(Problem("--dtypes", f"'{name}' is unknown", hint))
        elif name == "tf32" and not _has_tf32(kind):
            problems.append(
                Problem(
                    "--dtypes",
                    "tf32 is how CUDA GPUs since Ampere multiply float32, and this device does not",
                    f"Give {', '.join(other for other in DTYPES if other != name)}.",
                )
            )
    return [name for name in names if name in DTYPES]


def _has_tf32(kind: DeviceKind) -> bool:
    return kind == "cuda" and torch.cuda.get_device_capability() >= TF32_SINCE


def _free_memory(kind: DeviceKind) -> int:
    return torch.cuda.mem_get_info()[0] if kind == "cuda" else available_memory()


def _too_large(
    option: str, sizes: list[int], fitting: list[int], dtypes: list[str], needs: Needs, free: int
) -> list[Problem]:
    for size in sizes:
        if size not in fitting:
            most = max(needs(name, size) for name in dtypes) / GIBI
            hint = f"Give {fitting[-1]:,} or less." if fitting else "Give a smaller one."
            text = f"{size:,} takes {most:,.1f} GiB, and {free / GIBI:,.1f} GiB are free"
            return [Problem(option, text, hint)]
    return []
