"""Initialisers whose values an engine makes shard by shard: constants, and draws."""

from __future__ import annotations

import numpy as np
from keras import initializers

#: initialisers whose values are one draw, element by element
DRAWN = (
    initializers.RandomUniform,
    initializers.RandomNormal,
    initializers.TruncatedNormal,
    initializers.VarianceScaling,
)


def constant_of(initializer: object) -> int | float | None:
    """The value of an initialiser that gives every element the same; None of others."""
    if type(initializer) is initializers.Zeros:
        return 0.0
    if type(initializer) is initializers.Ones:
        return 1.0
    if type(initializer) is initializers.Constant and isinstance(initializer.value, (int, float, np.number)):
        return initializer.value  # type: ignore[return-value]
    return None


def is_drawn(initializer: object) -> bool:
    """Whether an initialiser makes its values as one of `DRAWN` does; a user's own class may do more."""
    return any(type(initializer).__call__ is kind.__call__ for kind in DRAWN)
