"""Operations of functional models that are believed to act row by row do so: the rows computed apart are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops, tree

from keras_flow.backends.row_wise import row_operations
from tests.tensors.cases import CASES, EVERY_NAME, Case
from tests.tensors.checking import close
from tests.tensors.engines import on_numpy

EVERY_CASE = [*CASES, *EVERY_NAME]
#: operators with a case that works along dimension 0, joins it with another dim, or says how many rows there are;
#: `conv` of groups, which Keras does not describe, and `moments`, which is in no table
ALONG_ROWS = frozenset(
    """broadcast_to conv cumprod cumsum matmul mean min moments pad prod reshape squeeze sum swapaxes take
    transpose""".split()
)


def verdicts(function: Callable[..., Any], inputs: list[Any]) -> list[str]:
    """What is found of the operations of a graph, in words."""
    outputs = function(*inputs)
    model = keras.Model(inputs, outputs)
    return [found.text for found in row_operations.of_operations(model)]


def is_believed(case: Case) -> bool:
    """Whether the operator of a case is believed; then its rows, computed apart, are compared with all of them."""
    given = list(case.tensors.values())
    leaves = tree.flatten(given)
    rows = len(leaves[0])
    # the others are weights, or indices: whole on each rank
    with_rows = [place for place, leaf in enumerate(leaves) if np.ndim(leaf) and len(leaf) == rows]

    def call(*values: Any) -> Any:
        filled = list(leaves)
        for place, value in zip(with_rows, values, strict=True):
            filled[place] = value
        tensors = dict(zip(case.tensors, tree.pack_sequence_as(given, filled), strict=True))
        if case.name == "einsum":
            return ops.einsum(case.options["subscripts"], *tensors["operands"])
        return getattr(ops, case.name)(**tensors, **case.options)

    inputs = [keras.Input(leaves[place].shape[1:], dtype=leaves[place].dtype.name) for place in with_rows]
    try:
        found = verdicts(call, inputs)
    except (TypeError, ValueError):  # Keras itself needs the number of rows
        return False
    if not inputs or found:
        return False
    arrays = [leaves[place] for place in with_rows]
    wanted = tree.flatten(call(*arrays))
    apart = [tree.flatten(call(*[array[part] for array in arrays])) for part in (slice(0, 1), slice(1, None))]
    for whole, *parts in zip(wanted, *apart, strict=True):
        assert close(np.concatenate(parts), np.asarray(whole), str(case.options.get("dtype", ""))), case
    return True


@on_numpy
def test_rows_computed_apart() -> None:
    believed = [is_believed(case) for case in EVERY_CASE]
    refused = {case.name for case, seen in zip(EVERY_CASE, believed, strict=True) if not seen}
    assert refused == ALONG_ROWS, sorted(refused ^ ALONG_ROWS)


#: graphs with an operation that is known, called so that rows meet
ROWS_MEET: dict[str, tuple[Callable[..., Any], list[tuple[int | None, ...]]]] = {
    "one row of an unknown number of dims": (lambda x: x[..., 0, :, :], [(None, None, 4)]),
    "the first rows": (lambda x: x[..., :2, :, :], [(None, 6, 4)]),
    "other blocks of rows": (lambda x: ops.reshape(x, (-1, 6)), [(None, 6, 4)]),
    "rows as another dim": (lambda x, y: x + y, [(None, 4), (None, 6, 4)]),
    "a row for each row": (lambda x: x + np.ones((8, 4), "float32"), [(8, 4)]),
    "eight rows": (lambda x: ops.reshape(x, (8, 2, 2)), [(8, 4)]),
    "along the rows": (lambda x: ops.softmax(x, axis=0), [(None, 4)]),
    "along all dims": (lambda x: ops.reshape(ops.cumsum(x), (-1, 4)), [(None, 4)]),
}


@pytest.mark.parametrize("name", ROWS_MEET)
@on_numpy
def test_rows_that_meet(name: str) -> None:
    function, shapes = ROWS_MEET[name]
    assert verdicts(function, [keras.Input(batch_shape=shape) for shape in shapes]), name


#: what is right with any number of rows
ROW_BY_ROW: dict[str, tuple[Callable[..., Any], list[tuple[int | None, ...]]]] = {
    "unknown lengths": (lambda x, y: ops.concatenate([x * y, y], axis=1), [(None, None, 4), (None, None, 4)]),
    "slices": (lambda x: x[:, None, ::2, 0], [(None, 6, 4)]),
    "chosen columns": (lambda x: ops.take(x, [0, 2], axis=1), [(None, 6, 4)]),
    "all but the last dim": (lambda x: x[..., 0], [(None, 6, 4)]),
    "given rows": (lambda x: ops.reshape(x, (-1, 2, 2)), [(8, 4)]),
    "a number": (lambda x: ops.where(x > 0, x, 0.0) / 2, [(None, 4)]),
    "products": (lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))), [(None, 6, 4)]),
    "a table": (lambda x: ops.take(np.ones((5, 3), "float32"), ops.cast(x, "int32"), axis=0), [(None, 4)]),
    "activations": (lambda x: ops.glu(ops.stop_gradient(ops.leaky_relu(x, 0.3))), [(None, 4)]),
    "the middle": (lambda x: ops.median(x, axis=1), [(None, 6, 4)]),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
@on_numpy
def test_row_by_row(name: str) -> None:
    function, shapes = ROW_BY_ROW[name]
    assert verdicts(function, [keras.Input(batch_shape=shape) for shape in shapes]) == []


@on_numpy
def test_the_words() -> None:
    class Mine(keras.Operation):
        def call(self, x: Any) -> Any:
            return x

        def compute_output_spec(self, x: Any) -> Any:
            return keras.KerasTensor(x.shape, x.dtype)

    def said(function: Callable[..., Any], *shapes: tuple[int | None, ...]) -> list[str]:
        return verdicts(function, [keras.Input(batch_shape=shape) for shape in shapes])

    assert said(lambda x: Mine()(x), (None, 4)) == ["operation Mine is not known to act row by row"]
    assert said(lambda x: ops.softmax(x, axis=0), (None, 4)) == ["operation Softmax works along dimension 0"]
    assert said(lambda x, y: x + y, (None, 4), (None, 6, 4)) == [
        "operation Add joins tensors of different ranks, so rows may meet"
    ]
