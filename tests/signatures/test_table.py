"""Every signature of every operator, run: each rank computes on its shards, and what they hold together is compared."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops, tree

import keras_flow as kf
from keras_flow import sbp
from keras_flow.layout import Layout, combine
from keras_flow.signatures import OperatorCall, Signature, registry
from keras_flow.signatures.choice import signatures
from keras_flow.tensors import keras_operators, per_rank
from keras_flow.tensors.dispatch import DECOMPOSITIONS
from keras_flow.tensors.global_tensor import GlobalTensor
from tests.tensors.cases import CASES, EVERY_NAME, Case
from tests.tensors.checking import arguments_of, close, shards_of
from tests.tensors.engines import on_engines, on_numpy


def wrong_signatures(case: Case, hierarchy: tuple[int, ...]) -> list[str]:
    """The signatures of a case on a hierarchy of ranks that do not give its value."""
    placement = kf.Placement(np.arange(np.prod(hierarchy)).reshape(hierarchy))
    function = getattr(ops, case.name)
    args, kwargs = arguments_of(case)
    arguments = keras_operators.arguments_by_name(function, args, kwargs)
    arrays = [leaf for value in arguments.values() for leaf in tree.flatten(value) if isinstance(leaf, np.ndarray)]

    def symbol(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        layout = Layout(placement, (sbp.broadcast,) * len(hierarchy), leaf.shape)
        return GlobalTensor(layout, keras.backend.standardize_dtype(leaf.dtype), {})

    symbols = {key: tree.map_structure(symbol, value) for key, value in arguments.items()}
    wanted = [ops.convert_to_numpy(value) for value in tree.flatten(keras_operators.call(function, arguments))]
    names = tuple(
        key for key, value in symbols.items() for leaf in tree.flatten(value) if isinstance(leaf, GlobalTensor)
    )
    options = {key: value for key, value in arguments.items() if key not in names}
    shapes = tuple(array.shape for array in arrays), tuple(tuple(value.shape) for value in wanted)
    dtypes = tuple(keras.backend.standardize_dtype(value.dtype) for value in (*arrays, *wanted))
    call = OperatorCall(case.name, *shapes, options, names, dtypes=dtypes)
    rows = list(signatures(call, hierarchy))
    wrong = [f"{len(rows)} signatures on {hierarchy}"] if hierarchy == (2,) and len(rows) < case.rows else []
    rng = np.random.default_rng(1)
    for inputs, outputs in rows:
        layouts = [Layout(placement, part, array.shape) for part, array in zip(inputs, arrays, strict=True)]
        results = [Layout(placement, part, value.shape) for part, value in zip(outputs, wanted, strict=True)]
        shards = [shards_of(layout, array, rng) for layout, array in zip(layouts, arrays, strict=True)]
        computed: list[dict[int, np.ndarray]] = [{} for _ in results]
        for rank in placement.ranks:
            compute = per_rank.function_of_rank(call, function, symbols, layouts, results, rank)
            values = compute(*[ops.convert_to_tensor(of_rank[rank]) for of_rank in shards])
            for of_result, value in zip(computed, values, strict=True):
                of_result[rank] = ops.convert_to_numpy(value)
        try:
            found = [combine(layout, of_result) for layout, of_result in zip(results, computed, strict=True)]
            dtype = call.options.get("dtype") or ""
            if all(close(value, other, dtype) for value, other in zip(found, wanted, strict=True)):
                continue
            reason = ""
        except kf.FlowError as error:
            reason = f": {error}"
        wrong.append(f"({'; '.join(map(sbp.text, inputs))}) -> ({'; '.join(map(sbp.text, outputs))}){reason}")
    return wrong


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{number}-{CASES[number].name}")
@on_engines
def test_signatures_of_an_operator(number: int) -> None:
    hierarchies = ((2,), (2, 2), (3,)) if keras.backend.backend() == "numpy" else ((2,),)  # 3: uneven shards
    assert {hierarchy: wrong_signatures(CASES[number], hierarchy) for hierarchy in hierarchies} == {
        hierarchy: [] for hierarchy in hierarchies
    }


@pytest.mark.parametrize("number", range(len(EVERY_NAME)), ids=lambda number: f"{number}-{EVERY_NAME[number].name}")
@on_numpy
def test_signatures_of_the_other_names(number: int) -> None:
    assert wrong_signatures(EVERY_NAME[number], (2,)) == []


@on_numpy
def test_counts_of_its_own_for_each_element() -> None:
    """They may keep the length of a dim, and move elements from one rank's part to another's. (JAX takes no list.)"""
    case = Case("repeat", {"x": np.arange(24.0).reshape(4, 6)}, {"repeats": [2, 0, 1, 1], "axis": 0}, 3)
    assert wrong_signatures(case, (2,)) == []


@on_numpy
def test_a_wrong_signature_is_seen() -> None:
    """The check can fail: a row that says that P passes through exp."""
    (case,) = (case for case in CASES if case.name == "exp")
    function = registry.SIGNATURE_FUNCTIONS["exp"]
    wrong = Signature((sbp.partial_sum,), (sbp.partial_sum,))
    registry.SIGNATURE_FUNCTIONS["exp"] = lambda call: iter([*function(call), wrong])
    try:
        assert wrong_signatures(case, (2,)) == ["(P) -> (P)"]
    finally:
        registry.SIGNATURE_FUNCTIONS["exp"] = function


def test_every_name_has_a_case() -> None:
    names = {case.name for case in (*CASES, *EVERY_NAME)}
    indices = {"getitem", "setitem"}  # tests/tensors/test_indexing.py
    assert set(registry.SIGNATURE_FUNCTIONS) | set(DECOMPOSITIONS) == names | indices
