"""The texts' worked examples of data parallelism, each with what is assumed: a table, sentences, JSON."""

from collections.abc import Sequence
from typing import Any

from fivefold.hardware.devices import GIBI
from fivefold.planner.scaling import half_peak
from fivefold.planner.worked_examples import MFU, AllReduce, Ratio, cluster_of

GIGA, MEGA = 1e9, 1e6


def first_line(example: AllReduce) -> str:
    """The texts' example of one all-reduce."""
    of, bandwidth = f"{example.payload / GIGA:g} GB of gradients", f"{example.bandwidth / GIGA:g} GB/s"
    return (
        f"{of} over {example.devices} devices at {bandwidth}: by a ring each sends {example.sent / GIGA:.1f} "
        f"GB, in {example.seconds:.2f} s. Behind {example.computation:.1f} s of computation: "
        f"{example.efficiency:.0%} of the time is of use."
    )


def rows(ratios: Sequence[Ratio]) -> list[tuple[str, ...]]:
    """A column for each case; the first names the figures."""
    figures = {
        "model": [f"{one.case.model}, {one.parameters / GIGA:,.1f}B" for one in ratios],
        "devices": [f"{one.case.cluster}, {_servers(one.servers)}" for one in ratios],
        "batch of a step": [f"{one.case.batch / MEGA:.1f}M tokens, as {one.case.batch_of}" for one in ratios],
        "tokens a device": [f"{one.tokens:,.0f}" for one in ratios],
        "a device sends": [f"{one.sent / GIGA:,.1f} GB" for one in ratios],
        "slowest link": [f"{one.link.bandwidth / GIGA:g} GB/s" for one in ratios],
        "communication": [_seconds(one.communication) for one in ratios],
        "computation": [_seconds(one.computation) for one in ratios],
        "ratio": [f"{one.ratio:.2g}" for one in ratios],
        "communication, planned": [_seconds(one.planned) for one in ratios],
        "ratio, planned": [f"{one.planned_ratio:.2g}" for one in ratios],
        "ratio of 1 at": [f"{one.even_tokens:,.0f} tokens a device" for one in ratios],
        "a batch of": [f"{one.even_batch:,.0f} tokens" for one in ratios],
        "a replica holds": [
            f"{one.held / GIGA:,.0f} GB of {one.memory / GIGA:.0f}" + ("" if one.fits else ": does not fit")
            for one in ratios
        ],
    }
    return [(name, *values) for name, values in figures.items()]


def header(ratios: Sequence[Ratio]) -> tuple[str, ...]:
    return ("", *(one.case.name for one in ratios))


def assumptions(ratios: Sequence[Ratio]) -> list[str]:
    devices = {cluster_of(one.case).device.name: half_peak(cluster_of(one.case).device) for one in ratios}
    peaks = ", ".join(f"{name} {peak / 1e12:,.4g} TFLOP/s" for name, peak in devices.items())
    return [
        "Assumed: gradients of 16 bits, summed once a step by a ring, nothing of it hidden behind computation"
        f"; computation at {MFU:.0%} of the dense peak ({peaks}), nothing recomputed; a replica holds "
        "weights, gradients in 32 bits and optimizer states, activations not counted.",
        "communication: servers are joined by one such link each. planned: as `fivefold plan` has it, one "
        "for each device, all of them used at once, at the rates that NCCL reaches.",
    ]


def where_it_breaks_down(ratios: Sequence[Ratio]) -> list[str]:
    """Where data parallelism alone ends: at the memory, then at the batch."""
    small = min(ratios, key=lambda one: one.parameters)
    last = max(ratios, key=lambda one: one.even_batch)
    fitting = " and ".join(one.case.name for one in ratios if one.fits)
    each = f"{small.held / small.parameters:.0f} bytes a parameter"
    most = f"{small.memory / GIBI:.0f} GiB hold at most {small.largest / GIGA:.1f}B parameters"
    return [
        f"Data parallelism alone breaks down at the memory first: a replica takes {each}, so {most}, and "
        f"{fitting or 'none of these models'} fits.",
        "Then at the batch: parameters are in both times and cancel out, so that the ratio falls with the "
        "tokens of a device alone, and more devices share a batch that does not grow with them. "
        f"{last.case.devices:,} devices compute half of the time from {last.even_batch / MEGA:,.1f}M tokens "
        f"a step on; {last.case.batch_of} had {last.case.batch / MEGA:,.1f}M.",
    ]


def as_json(example: AllReduce, ratios: Sequence[Ratio]) -> dict[str, Any]:
    """Bytes, seconds, tokens."""
    return {
        "all_reduce": {
            "payload": example.payload,
            "devices": example.devices,
            "bandwidth": example.bandwidth,
            "sent": example.sent,
            "seconds": example.seconds,
            "computation": example.computation,
            "efficiency": example.efficiency,
        },
        "ratios": [
            {
                "name": one.case.name,
                "model": one.case.model,
                "parameters": one.parameters,
                "cluster": one.case.cluster,
                "devices": one.case.devices,
                "batch_tokens": one.case.batch,
                "sent": one.sent,
                "bandwidth": one.link.bandwidth,
                "communication": one.communication,
                "computation": one.computation,
                "ratio": one.ratio,
                "communication_planned": one.planned,
                "ratio_planned": one.planned_ratio,
                "even_tokens_a_device": one.even_tokens,
                "even_batch_tokens": one.even_batch,
                "held": one.held,
                "memory": one.memory,
            }
            for one in ratios
        ],
        "assumed": " ".join(assumptions(ratios)),
        "breaks_down": " ".join(where_it_breaks_down(ratios)),
    }


def _servers(count: int) -> str:
    return "1 server" if count == 1 else f"{count:,} servers"


def _seconds(value: float) -> str:
    return f"{value:,.3g} s"
