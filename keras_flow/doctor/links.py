"""Fits latency and bandwidth of a link to measured all-reduces, by Hockney's model of a ring."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from keras_flow.doctor.report import Ring


def fit(ranks: int, seconds: Mapping[int, float]) -> Ring:
    """The latency and bandwidth with the smallest relative error of the measured times (least squares).

    A ring over p ranks sends 2 (p - 1) messages one after the other, each of a p-th of the tensor (Thakur,
    Rabenseifner, Gropp 2005), so that an all-reduce of n bytes takes `2 (p - 1) latency + 2 (p - 1) / p n / bandwidth`.

    Args:
        ranks: number of ranks.
        seconds: bytes of the tensor -> seconds.

    Example:
        >>> ring = fit(2, {1000: 2 * 1e-5 + 1000 / 1e9, 10**6: 2 * 1e-5 + 10**6 / 1e9})
        >>> round(ring.latency * 1e6), round(ring.bandwidth / 1e6)
        (10, 1000)
    """
    messages = 2 * (ranks - 1)
    sizes = np.array(list(seconds), dtype=float)
    times = np.array([seconds[int(size)] for size in sizes])
    columns = np.stack([np.full(len(sizes), messages, dtype=float), messages / ranks * sizes], axis=1)
    latency, inverse = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)), rcond=None)[0]
    if latency < 0:  # the smallest message cannot take less than nothing
        latency, inverse = 0.0, float(np.median(times / columns[:, 1]))
    if inverse <= 0:  # all sizes took the same: the largest bounds the bandwidth
        latency, inverse = float(np.median(times / messages)), float(times[-1] / columns[-1, 1])
    return Ring(ranks, float(latency), float(1 / inverse), {int(size): float(seconds[int(size)]) for size in sizes})
