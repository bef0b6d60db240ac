"""A link from times of all-reduces."""

import pytest

from keras_flow.doctor.links import fit

SIZES = (1 << 10, 1 << 16, 1 << 22)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_exact_times_give_the_link_back(ranks: int) -> None:
    latency, bandwidth = 20e-6, 3e9
    seconds = {size: 2 * (ranks - 1) * (latency + size / ranks / bandwidth) for size in SIZES}
    ring = fit(ranks, seconds)
    assert ring.latency == pytest.approx(latency, rel=1e-6)
    assert ring.bandwidth == pytest.approx(bandwidth, rel=1e-6)


@pytest.mark.parametrize("seconds", [dict.fromkeys(SIZES, 1e-3), {SIZES[0]: 1e-6, SIZES[1]: 1e-3, SIZES[2]: 1e-2}])
def test_a_link_is_always_legal(seconds: dict[int, float]) -> None:
    ring = fit(2, seconds)
    assert ring.latency >= 0
    assert 0 < ring.bandwidth < float("inf")
