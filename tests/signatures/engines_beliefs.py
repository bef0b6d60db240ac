"""Where the table of signatures and what is believed of an engine's own rules disagree.

`KERAS_BACKEND=torch python -m tests.signatures.engines_beliefs` runs each case of the table under the engine and prints
the operators that the table splits while an operation that computes them is not believed: DTensor's rules on torch
(`believed_rules`), those on TensorFlow (`WITH_RULE`), XLA's splits of dims that are left over on JAX. Such an operator
is computed on gathered tensors in a step, and on its pieces as a global tensor. Forward computations only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from tests.tensors.cases import CASES, EVERY_NAME, Case
from tests.tensors.checking import arguments_of

#: operators of torch that make tensors of numbers: none is split yet
_MADE_OF_NUMBERS = frozenset(["aten::lift_fresh", "aten::full", "aten::zeros"])


def of_torch(call: Callable[..., Any], arrays: list[np.ndarray]) -> set[str]:
    """The operators of a call whose DTensor rules are not believed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from keras_flow.backends.torch.operators import believed_rules

    found: set[str] = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            believed = believed_rules.is_trusted(operator) or believed_rules.is_taken_apart(operator)
            if not believed and operator._schema.name not in _MADE_OF_NUMBERS:
                found.add(str(operator))
            return operator(*args, **(kwargs or {}))

    tensors = [ops.convert_to_tensor(array) for array in arrays]
    with Seen():
        call(*tensors)
    return found


def of_tensorflow(call: Callable[..., Any], arrays: list[np.ndarray]) -> set[str]:
    """The types of operations of a call that DTensor has no rule for."""
    import tensorflow as tf

    from keras_flow.backends.tensorflow.operators.replicated_operations import WITH_RULE

    graph = tf.function(call).get_concrete_function(*map(tf.constant, arrays)).graph
    return {operation.type for operation in graph.get_operations()} - WITH_RULE


def of_jax(call: Callable[..., Any], arrays: list[np.ndarray]) -> set[str]:
    """The primitives of a call that XLA is not proven to split where a dim does not divide."""
    import jax

    from keras_flow.backends.jax import partitioning

    equations = partitioning._equations(jax.make_jaxpr(call)(*arrays).jaxpr)
    return {each.primitive.name for each in equations if not partitioning.splits_left_over_dims(each)}


def report() -> dict[str, set[str]]:
    """Operator of `keras.ops` -> operations of the active engine that are not believed."""
    of_engine = {"torch": of_torch, "tensorflow": of_tensorflow, "jax": of_jax}[keras.backend.backend()]
    found: dict[str, set[str]] = {}
    for case in (*CASES, *EVERY_NAME):
        if case.name == "imag":  # torch refuses it for real numbers
            continue
        if unbelieved := of_engine(*_of_arrays(case)):
            found.setdefault(case.name, set()).update(unbelieved)
    return found


def _of_arrays(case: Case) -> tuple[Callable[..., Any], list[np.ndarray]]:
    args, kwargs = arguments_of(case)
    given = tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(given) if isinstance(leaf, np.ndarray)]

    def call(*values: Any) -> Any:
        filled = list(given)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        packed_args, packed_kwargs = tree.pack_sequence_as((args, kwargs), filled)
        return getattr(ops, case.name)(*packed_args, **packed_kwargs)

    return call, [given[place] for place in places]


if __name__ == "__main__":
    for name, unbelieved in sorted(report().items()):
        print(f"{name}: {', '.join(sorted(unbelieved))}")
