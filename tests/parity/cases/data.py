"""Data of the grid: small, fixed, and with a number of rows that divides by nothing."""

import numpy as np

ROWS = 70  # five batches of 16, the last of 6 rows
BATCH = 16
EPOCHS = 4  # 20 steps

_random = np.random.default_rng(3)

FEATURES = _random.standard_normal((ROWS, 16)).astype("float32")
LABELS = _random.integers(0, 8, ROWS).astype("int32")
WEIGHTS = _random.uniform(0.5, 1.5, ROWS).astype("float32")
IMAGES = _random.standard_normal((ROWS, 8, 8, 4)).astype("float32")
TOKENS = np.where(
    np.arange(12)[None] < _random.integers(3, 13, ROWS)[:, None], _random.integers(1, 32, (ROWS, 12)), 0
).astype("int32")
SHORT_TOKENS = TOKENS[:, ::-1][:, 7:11].copy()  # four steps, padded in front and never alone
FULL_TOKENS = _random.integers(1, 32, (ROWS, 12)).astype("int32")
NEXT_TOKENS = _random.integers(0, 32, (ROWS, 12)).astype("int32")
TARGETS = _random.standard_normal((ROWS, 4)).astype("float32")
BINARY = _random.integers(0, 2, (ROWS, 1)).astype("float32")
