"""Times out of measurements: a table that rises, and the latency and bandwidth of a level."""

import math

import numpy as np

from fivefold.hardware.cluster import Level, Times


def rising(times: Times) -> Times:
    """The table nearest to `times` in which a larger message never takes less time.

    Where it would, noise did it: neighbours that are out of order share their (geometric) mean.
    """
    pools: list[tuple[float, int]] = []
    for _, seconds in times:
        pools.append((math.log(seconds), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, ones), (two, twos) = pools[-2:]
            pools[-2:] = [((one * ones + two * twos) / (ones + twos), ones + twos)]
    smooth = [math.exp(value) for value, count in pools for _ in range(count)]
    return tuple((payload, seconds) for (payload, _), seconds in zip(times, smooth, strict=True))


def latency_and_bandwidth(times: Times) -> tuple[float, float]:
    """seconds = latency + payload / bandwidth, with the least sum of squares of RELATIVE errors.

    So a microsecond's message counts as much as a second's. Neither term is ever negative.
    """
    payloads, seconds = np.asarray(times).T
    columns = np.stack([1 / seconds, payloads / seconds], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
    if latency <= 0:
        latency, slope = 0.0, float(np.median(seconds / payloads))
    elif slope <= 0:
        latency, slope = float(np.median(seconds)), float(np.min(seconds / payloads))
    return float(latency), float(1 / slope)


def fitted_level(name: str, ranks: int, gathers: Times) -> Level:
    """The level whose ring would take the times of these all-gathers over all its `ranks`.

    It stands in for what was not measured; messages among the probed ranks are read from the tables.
    """
    latency, bandwidth = latency_and_bandwidth(gathers)
    return Level(name, ranks, bandwidth * (ranks - 1) / ranks, latency / (ranks - 1))
