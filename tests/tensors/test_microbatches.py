"""`kf.unpack` and `kf.pack` are inverses, for every layout, and name what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

import keras_flow as kf

pytestmark = pytest.mark.usefixtures("four_ranks")
ROWS = np.arange(12 * 3, dtype="float32").reshape(12, 3)


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
@pytest.mark.parametrize("n", [1, 4, 12])
def test_inverse(sbp: str, n: int) -> None:
    x = kf.tensor(ROWS, placement=kf.Placement(range(4)), sbp=sbp)
    parts = kf.unpack(x, n)
    assert (parts.numpy() == ROWS.reshape(n, 12 // n, 3)).all()
    assert (kf.pack(parts, n).numpy() == ROWS).all()


def test_arrays() -> None:
    parts = np.asarray(kf.unpack(ROWS, 3))
    assert parts.shape == (3, 4, 3) and (np.asarray(kf.pack(parts, 3)) == ROWS).all()


def test_gradients_are_packed() -> None:
    x = kf.tensor(ROWS, placement=kf.Placement(range(4)), sbp="S(0)")
    scale = np.arange(4, dtype="float32").reshape(4, 1, 1)
    _, gradient = kf.value_and_grad(lambda x: kf.ops.sum(kf.unpack(x, 4) * scale))(x)
    gradient = gradient[0] if isinstance(gradient, tuple | list) else gradient
    assert (gradient.numpy() == np.repeat(np.arange(4), 3)[:, None]).all()


def test_what_does_not_fit() -> None:
    with pytest.raises(kf.FlowError, match=r"the 12 rows of shape \[12, 3\] cannot be cut into 5 micro-batches"):
        kf.unpack(ROWS, 5)
    with pytest.raises(kf.FlowError, match="a scalar cannot be cut"):
        kf.unpack(np.float32(1), 1)
    with pytest.raises(kf.FlowError, match=r"shape \[12, 3\] is not that of 4 micro-batches"):
        kf.pack(ROWS, 4)
