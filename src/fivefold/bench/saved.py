"""A sweep as JSON, and back: measured on one machine, drawn on another."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.bench.reached import Bench, Point, Reached, Sweep
from fivefold.problems import BadInput, Problem

OPTION = "--from"
SHARE = {"matmul": "hfu", "mlp": "mfu"}


def as_json(sweep: Sweep) -> dict[str, Any]:
    """Rates are in FLOP/s; `hfu` or `mfu` are shares of the peak, None where it is not known."""
    return {
        "bench": sweep.bench,
        "device": sweep.device,
        "torch": sweep.torch,
        "seconds": sweep.seconds,
        "peak_flops": dict(sweep.peaks),
        **sweep.shape,
        "points": [_point(sweep, point) for point in sweep.points],
    }


def _point(sweep: Sweep, point: Point) -> dict[str, Any]:
    share = SHARE[sweep.bench]
    fresh, sustained = sweep.shares(point) or (None, None)
    return {
        "dtype": point.dtype,
        "size": point.size,
        "fresh": point.reached.fresh,
        "sustained": point.reached.sustained,
        f"{share}_fresh": fresh,
        f"{share}_sustained": sustained,
    }


def read(path: str, bench: Bench) -> Sweep:
    """What `fivefold bench BENCH --json` printed into this file. Raises `BadInput`."""
    told = _loaded(path, bench)
    if told.get("bench") != bench:
        was = told.get("bench")
        why = f"is of `fivefold bench {was}`" if was in SHARE else "is not what `fivefold bench` prints"
        raise _refusal(path, why, bench)
    try:
        return Sweep(
            bench,
            str(told["device"]),
            str(told["torch"]),
            float(told["seconds"]),
            {str(name): float(rate) for name, rate in told["peak_flops"].items()},
            tuple(
                Point(
                    str(one["dtype"]), int(one["size"]), Reached(float(one["fresh"]), float(one["sustained"]))
                )
                for one in told["points"]
            ),
            {key: int(told[key]) for key in ("width", "layers") if key in told},
        )
    except KeyError as missing:
        raise _refusal(path, f"has no {missing}", bench) from None
    except (TypeError, ValueError, AttributeError) as wrong:
        raise _refusal(path, f"is damaged: {wrong}", bench) from None


def _loaded(path: str, bench: Bench) -> Mapping[str, Any]:
    try:
        told = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise _refusal(path, "there is no such file", bench) from None
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}", bench) from None
    except ValueError as error:  # not JSON, or not even text
        raise _refusal(path, f"is no JSON: {error}", bench) from None
    return told if isinstance(told, dict) else {}


def _refusal(path: str, why: str, bench: Bench) -> BadInput:
    hint = f"Give a file that `fivefold bench {bench} --json > FILE` has written."
    return BadInput([Problem(OPTION, f"'{path}' {why}", hint)])
