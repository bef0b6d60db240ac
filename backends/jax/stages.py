"""Stages of a pipeline on JAX: a compiled program for each stage and pass, on the device of its rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_flow.backends.jax import layouts, partitioning, split_backward
from keras_flow.backends.jax.devices import rank_devices
from keras_flow.current.distribution import Distribution, holding
from keras_flow.current.variable_layout import keras_layout, stage_rank
from keras_flow.errors import warn


class _CompiledStage:
    """A stage as compiled programs.

    Args:
        function: takes weights, tensors and others, and returns what has gradients, and all else.
        rank: its device computes.
        compiled: whether to compile.
        split: what lays tensors over the rank and others, which compute together; None for no others.
    """

    def __init__(self, function: Callable[..., Any], rank: int, compiled: bool, split: Distribution | None):
        self._place = functools.partial(on, rank, split=split)

        def program(function: Callable[..., Any]) -> Callable[..., Any]:
            whole = function if split is None else functools.partial(_partitioned, split, compiled, function)
            return jax.jit(whole) if compiled else whole

        self._splits, self._program = compiled, program
        self._run = program(function)
        self._forward = program(functools.partial(_with_pullback, function))
        self._backward = program(_pulled_back)
        #: what a pullback and gradients look like -> the two parts of the backward pass
        self._parts: dict[Any, split_backward.Parts] = {}

    def run(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any]:
        """Compute the stage without gradients."""
        return self._run(*self._place((list(weights), list(tensors), others)))

    def forward(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any, Any]:
        """Compute the stage; also what its backward pass needs."""
        (outputs, rest), pullback = self._forward(*self._place((list(weights), list(tensors), others)))
        return outputs, rest, (pullback, outputs)

    def backward(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], list[Any]]:
        """Gradients by the weights, and by the tensors that were received.

        Args:
            held: what `forward` returned.
            from_next: gradients by the tensors sent, from the stage that got them; None for no such.
            scale: the gradient by the sum of the stage's losses.
        """
        return self._backward(*self._cotangents(held, from_next, scale))

    def backward_inputs(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], tuple[Any, list[Any]]]:
        """Gradients by the tensors that were received, and what `backward_weights` needs.

        An eager pullback is another one for each micro-batch: its parts would be traced each time, so it is run whole.
        """
        if not self._splits:
            by_weights, by_received = self.backward(held, from_next, scale)
            return by_received, (lambda *known: list(known), by_weights)
        arguments, structure = jax.tree.flatten(self._cotangents(held, from_next, scale))
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in arguments)
        if key not in self._parts:
            first, second, needed = split_backward.parts(functools.partial(_by_inputs_first, structure), arguments)
            self._parts[key] = self._program(first), self._program(second), needed
        first, second, needed = self._parts[key]
        by_received, read = first(*arguments)
        return by_received, (second, [*(arguments[number] for number in needed), *read])

    def backward_weights(self, later: tuple[Any, list[Any]]) -> list[Any]:
        """Gradients by the weights."""
        program, arguments = later
        return program(*arguments)

    def _cotangents(self, held: Any, from_next: Any, scale: float) -> tuple[Any, list[Any]]:
        """The pullback, and a gradient for each output."""
        pullback, outputs = held
        given = [None] * (len(outputs) - 1) if from_next is None else from_next
        cotangents = [
            jnp.zeros_like(output) if gradient is None else gradient
            for output, gradient in zip(outputs[:-1], given, strict=True)
        ]
        cotangents.append(jnp.full_like(outputs[-1], scale))
        return pullback, self._place(cotangents)


def stage_program(
    function: Callable[..., Any], rank: int, compiled: bool, split: Distribution | None = None
) -> _CompiledStage:
    """A stage's function as what computes it, and its gradients, on a rank or with it on others."""
    return _CompiledStage(function, rank, compiled, split)


def compiled(function: Callable[..., Any], rank: int, is_compiled: bool) -> Callable[..., Any]:
    """A function of values that is computed on the device of a rank."""
    program = jax.jit(function) if is_compiled else function
    return lambda *values: program(*on(rank, values))


def on(rank: int, structure: Any, split: Distribution | None = None) -> Any:
    """A structure of arrays on the device of a rank, or with it on others, over which they keep their layout."""
    if split is None:
        return jax.device_put(structure, rank_devices()[rank])
    mesh = layouts.mesh(split.placement)

    def sharding(leaf: Any) -> NamedSharding:
        before = getattr(leaf, "sharding", None)
        if isinstance(before, NamedSharding) and before.mesh.axis_names == mesh.axis_names:
            return NamedSharding(mesh, before.spec)
        return NamedSharding(mesh, PartitionSpec())

    return jax.device_put(structure, jax.tree.map(sharding, structure))


def add(total: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Add gradients one by one; None where there is neither summand."""
    pairs = [(one, other) for one, other in zip(total, more, strict=True) if one is not None and other is not None]
    sums = iter(_added(*map(list, zip(*pairs, strict=True)))) if pairs else iter(())
    return [
        other if one is None else one if other is None else next(sums) for one, other in zip(total, more, strict=True)
    ]


def read(variable: keras.Variable) -> jax.Array:
    """Return the value of a variable, on the device where it is."""
    return variable._value


def write(variable: keras.Variable, value: jax.Array) -> None:
    """Assign to a variable a value that was computed on its devices."""
    layout = keras_layout(variable) if isinstance(value.sharding, NamedSharding) else None
    # a program of several ranks lays what it returns as XLA likes
    variable._value = value if layout is None else jax.device_put(value, layout.backend_layout)


def apply_gradients(
    optimizer: Any,
    parts: Sequence[tuple[int, list[keras.Variable], list[Any]]],
    is_compiled: bool,
    programs: dict[Any, Any],
) -> None:
    """Update the weights of each rank, by a program of its own."""
    slots = list(optimizer.variables)
    homes = [_home(slot) for slot in slots]
    shared = [slot for slot, home in zip(slots, homes, strict=True) if home is None]
    shared_values = [read(slot) for slot in shared]
    new_shared = shared_values
    for rank, variables, gradients in parts:
        own = [slot for slot, home in zip(slots, homes, strict=True) if home == rank]
        key = tuple(tuple(map(id, each)) for each in ([optimizer], variables, own, shared))
        if key not in programs:
            programs[key] = _update_program(optimizer, variables, own, shared, is_compiled)
        values = ([read(each) for each in variables], [read(each) for each in own], shared_values, gradients)
        weights, new_slots, new_shared = programs[key](*on(rank, values, _split_of(variables)))
        for variable, value in (*zip(variables, weights, strict=True), *zip(own, new_slots, strict=True)):
            write(variable, value)
    # counters and rates: every program has moved them on alike
    for slot, value, before in zip(shared, new_shared, shared_values, strict=True):
        write(slot, jax.device_put(value, before.sharding))


def _split_of(variables: Sequence[keras.Variable]) -> Distribution | None:
    """Return the distribution that lays a stage's variables over several ranks; None where one rank has them."""
    found = keras_layout(variables[0]) if variables else None
    return None if found is None or found.distribution.has_one_rank else found.distribution


def _home(slot: keras.Variable) -> int | None:
    """The rank that holds a slot, as this process sees it; None of what no stage has."""
    layout = keras_layout(slot)
    return None if layout is None or stage_rank(slot) is None else layout.layout.placement.ranks[0]


def _update_program(
    optimizer: Any,
    variables: Sequence[keras.Variable],
    own: Sequence[keras.Variable],
    shared: Sequence[keras.Variable],
    is_compiled: bool,
) -> Callable[..., Any]:
    """An update of a rank's weights as a function of values: of these, of their slots, of what ranks share."""

    def update(weights: Any, slots: Any, others: Any, gradients: Any) -> Any:
        mapping = [
            *zip(variables, weights, strict=True),
            *zip(own, slots, strict=True),
            *zip(shared, others, strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            optimizer.apply(gradients, list(variables))
        values = {id(variable): value for variable, value in mapping}

        def now(variable: keras.Variable) -> Any:
            value = scope.get_current_value(variable)
            return values[id(variable)] if value is None else value

        return [[now(variable) for variable in group] for group in (variables, own, shared)]

    return jax.jit(update) if is_compiled else update


def step_function(model: keras.Model, name: str, step: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the function that Keras's loop calls: `steps_per_execution` steps; it takes the state and returns it."""
    if not (model.jit_compile or model.run_eagerly):
        warn(f"model {model.name!r}: a pipeline compiles its stages also with jit_compile=False; take run_eagerly=True")

    def groups() -> list[list[keras.Variable]]:
        every: Any = model
        lists = [every.trainable_variables, every.non_trainable_variables]
        if name == "train":
            lists.append(every.optimizer.variables)
        if name != "predict":
            lists.append(every.metrics_variables)
        return lists

    def function(state: Any, iterator: Any) -> tuple[Any, Any]:
        for variables, values in zip(groups(), state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                write(variable, value)
        results = []
        for number in range(model.steps_per_execution):
            try:
                data = next(iterator)
            except StopIteration:
                if number == 0:
                    raise
                break
            results.append(step(data))
        outputs = results[-1]
        if name == "predict" and len(results) > 1:
            outputs = jax.tree.map(lambda *rows: jnp.concatenate(rows), *results)
        return outputs, tuple([read(variable) for variable in variables] for variables in groups())

    return function


def _with_pullback(function: Callable[..., Any], weights: Any, tensors: Any, others: Any) -> Any:
    def differentiated(weights: Any, tensors: Any) -> Any:
        return function(weights, tensors, others)

    outputs, pullback, rest = jax.vjp(differentiated, weights, tensors, has_aux=True)
    return (outputs, rest), pullback


def _pulled_back(pullback: Callable[..., Any], cotangents: Any) -> Any:
    return pullback(cotangents)


def _by_inputs_first(structure: Any, *arguments: Any) -> tuple[list[Any], list[Any]]:
    pullback, cotangents = jax.tree.unflatten(structure, arguments)
    by_weights, by_received = pullback(cotangents)
    return by_received, by_weights


@jax.jit
def _added(total: list[jax.Array], more: list[jax.Array]) -> list[jax.Array]:
    return jax.tree.map(jnp.add, total, more)


def _partitioned(distribution: Distribution, compiled: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Compute a function under the distribution that splits its stage."""
    with holding(distribution):
        return partitioning.partitioned(function, args) if compiled else function(*args)
