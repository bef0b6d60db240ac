"""What users call is typed: no parameter or result of a public function or method is `Any` or without a type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest

import keras_flow as kf
from keras_flow.tensors.gradients import ValueAndGrad
from keras_flow.tensors.ops import Operator

_HVD = ("allgather", "allreduce", "alltoall", "broadcast", "reducescatter")

#: function, parameter or `return` -> why it has no type
UNTYPED = {
    ("GlobalTensor.to_local", "return"): "the array of the engine: of NumPy, JAX, TensorFlow or torch",
    ("GlobalTensor.to_engine", "return"): "the array of the engine: of JAX, TensorFlow or torch",
    (
        "Operator.__call__",
        "return",
    ): "a tensor or several, by operator; Keras's own have no type",
    ("Operator.without_decomposition", "return"): "as of a call",
    ("ValueAndGrad.__call__", "return"): "gradients in the structure of the arguments",
    ("DistributedDataParallel.__call__", "args"): "those of the model",
    ("DistributedDataParallel.__call__", "kwargs"): "those of the model",
    (
        "DistributedDataParallel.__call__",
        "return",
    ): "the model's outputs: arrays of the engine, in a structure of its own",
    ("DistributedDataParallel.average", "gradients"): "arrays of the engine",
    ("DistributedDataParallel.average", "return"): "arrays of the engine",
    ("DistributedDataParallel.value_and_grad", "loss_function"): "a function of arrays of the engine",
    ("DistributedDataParallel.value_and_grad", "return"): "a function of arrays of the engine",
    ("notebook.pull", "return"): "the values of variables of the workers",
    ("notebook.run", "function"): "any function",
    ("notebook.run", "return"): "what the function returns, by rank",
    ("comm.broadcast_object", "return"): "the object",
    ("comm.all_gather_object", "return"): "the objects",
    **{(f"hvd.{name}", "tensor"): "an array of the engine, or what becomes one" for name in _HVD},
    **{(f"hvd.{name}", "return"): "an array of the engine" for name in _HVD},
    ("hvd.alltoall", "splits"): "numbers of rows, in whatever holds numbers",
    ("hvd.grouped_allreduce", "tensors"): "arrays of the engine",
    ("hvd.grouped_allreduce", "return"): "arrays of the engine",
    **{(f"hvd.{name}_object", "obj"): "any object" for name in ("allgather", "broadcast")},
    **{(f"hvd.{name}_object", "return"): "the object, or one of each rank" for name in ("allgather", "broadcast")},
    **{
        (f"hvd.{name}", "compression"): "a class of `hvd.Compression`, or one of the program's with its two functions"
        for name in ("allreduce", "grouped_allreduce", "reducescatter", "DistributedOptimizer", "load_model")
    },
    ("hvd.PartialDistributedOptimizer", "args"): "those of DistributedOptimizer",
    ("hvd.PartialDistributedOptimizer", "options"): "those of DistributedOptimizer",
    ("hvd.load_model", "custom_objects"): "classes and functions",
    ("hvd.run", "func"): "any function",
    ("hvd.run", "args"): "of the function",
    ("hvd.run", "kwargs"): "of the function",
    ("hvd.run", "return"): "what the function returns, by rank",
    **{
        (f"comm.{name}", "return"): "arrays of the engine: this rank's, or rank -> array; a `Work` where asked for"
        for name in "all_gather all_gather_into_tensor all_to_all broadcast gather scatter recv all_reduce reduce "
        "reduce_scatter reduce_scatter_tensor".split()
    },
}


def functions() -> Iterator[tuple[str, object]]:
    """Name and function: those of `kf`, methods of its classes, functions of its modules, and what they return."""
    things = [(name, getattr(kf, name)) for name in kf.__all__]
    things += [("Operator", Operator), ("ValueAndGrad", ValueAndGrad)]
    things += [(f"boxing.{name}", value) for name, value in vars(kf.boxing).items() if inspect.isclass(value)]
    for name, thing in things:
        if inspect.isclass(thing):
            for member, value in inspect.getmembers(thing):
                own = str(getattr(value, "__module__", "")).startswith("keras_flow")
                if own and inspect.isfunction(value) and (not member.startswith("_") or member == "__call__"):
                    yield f"{name}.{member}", value
        elif inspect.ismodule(thing):
            is_package = hasattr(thing, "__path__")  # its names are defined in modules below
            for member, value in vars(thing).items():
                own = is_package or getattr(value, "__module__", "") == thing.__name__
                if own and inspect.isfunction(value) and not member.startswith("_"):
                    yield f"{name}.{member}", value
        elif inspect.isfunction(thing):
            yield name, thing


FUNCTIONS = dict(functions())


def untyped(function: object) -> Iterator[str]:
    """Parameters, or `return`, that are `Any` or have no annotation."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    for place, parameter in enumerate(signature.parameters.values()):
        if place == 0 and parameter.name in ("self", "cls"):
            continue
        if parameter.annotation is parameter.empty or re.search(r"\bAny\b", str(parameter.annotation)):
            yield parameter.name
    if signature.return_annotation is signature.empty or re.search(r"\bAny\b", str(signature.return_annotation)):
        yield "return"


def test_there_are_functions() -> None:
    assert len(FUNCTIONS) > 70


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types(name: str) -> None:
    assert [part for part in untyped(FUNCTIONS[name]) if (name, part) not in UNTYPED] == []


def test_each_exception_is_needed() -> None:
    assert [key for key in UNTYPED if key[1] not in untyped(FUNCTIONS[key[0]])] == []
