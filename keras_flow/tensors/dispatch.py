"""Dispatch: choose a signature for an operator, box its inputs to it, compute on each rank, record it for gradients.

`cheapest` is the entry: it first asks whether a decomposition, the operator written as several others, receives fewer
bytes. Those register here with `@decomposes` (as PyTorch's do with `register_decomposition`), so that dispatch knows
them without importing them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_flow import sbp as _sbp
from keras_flow.backends.active import tensor_engine
from keras_flow.backends.rendezvous import meeting
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import Split
from keras_flow.signatures import Choice, OperatorCall, choose
from keras_flow.signatures.call import dims_of
from keras_flow.tensors import creation, dry_run, keras_operators, per_rank, tape
from keras_flow.tensors.dtypes import default_of_array, is_float, numpy_dtype
from keras_flow.tensors.global_tensor import GlobalTensor, change_layout
from keras_flow.tensors.ranks import local_ranks

# ---- decompositions

#: operator -> function of its arguments that returns the decomposed program, or None where no split dim is concerned
DECOMPOSITIONS: dict[str, Callable[[Mapping[str, Any]], Callable[[], Any] | None]] = {}

#: operator and arguments, tensors by their layouts -> whether the decomposition costs less
_is_cheaper: dict[tuple[object, ...], bool] = {}


def decomposes(
    name: str,
    *,
    along: str,
    axis: str = "axis",
    only_if: Callable[[Mapping[str, Any], tuple[int, ...]], bool] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the decomposition of an operator, for calls along a split dim.

    The function takes the operator's arguments by name; of these the axis is given as a sorted tuple of dims.

    Args:
        name: the operator of `keras.ops`.
        along: parameter whose tensor must be split along one of the dims.
        axis: parameter that names the dims.
        only_if: takes the arguments and dims; returns whether the function covers such a call. None: it covers all.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def program(arguments: Mapping[str, Any]) -> Callable[[], Any] | None:
            tensor = arguments[along]
            # of complex numbers a square is no length, and an order is the engine's own
            if not isinstance(tensor, GlobalTensor) or tensor.dtype.startswith("complex"):
                return None
            # None is every dim, -1 the last: from here on they are numbers from 0 up
            dims = tuple(sorted(dims_of(arguments[axis], tensor.ndim)))
            is_split = any(isinstance(part, Split) and part.dim in dims for part in tensor.sbp)
            if not is_split or (only_if is not None and not only_if(arguments, dims)):
                return None
            return functools.partial(function, **{**arguments, axis: dims})

        DECOMPOSITIONS[name] = program
        return function

    return register


def cheapest(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The result of an operator, by its decomposition where that costs less.

    Fewer bytes received by all ranks together win, then fewer elements on the fullest rank. Both ways are tried in a
    dry run when arguments have these layouts for the first time.

    Args:
        name: the operator of `keras.ops`.
        function: computes it on arrays of the engine.
        arguments: parameter -> value.
    """
    program = DECOMPOSITIONS[name](arguments) if name in DECOMPOSITIONS else None
    if program is None:
        return run(name, function, arguments)
    # values do not matter for the cost, so that a training loop asks once
    leaves = tree.flatten(dict(arguments))
    key = name, *((leaf.layout, leaf.dtype) if isinstance(leaf, GlobalTensor) else repr(leaf) for leaf in leaves)
    if key not in _is_cheaper:
        as_one = functools.partial(run, name, function, arguments)
        # an operator that is part of a decomposition has been through this itself
        _is_cheaper[key] = dry_run.cost_of(program) < dry_run.cost_of(as_one)
    return program() if _is_cheaper[key] else run(name, function, arguments)


# ---- one operator


def run(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The result of an operator itself, in the structure that `function` gives it.

    Args:
        name: the operator, a name in the table of signatures; others run on whole inputs.
        function: computes it on arrays of the engine, and describes the result of `KerasTensor`s.
        arguments: parameter -> value; global tensors, or lists of them, among other values.

    Raises:
        FlowError: no global tensor among the arguments, tensors on different placements, or a result whose shape
            depends on values.
    """
    arguments = _arrays_made_global(name, arguments)
    leaves = [(key, leaf) for key, value in arguments.items() for leaf in tree.flatten(value)]
    inputs = [leaf for _, leaf in leaves if isinstance(leaf, GlobalTensor)]
    _check_one_placement(name, inputs)
    # Keras says what comes out; no table of shapes of our own can then contradict it
    described = _describe(function, arguments)
    outputs = tree.flatten(described)
    _check_shapes_known(name, arguments, outputs)
    dtypes = [output.dtype for output in outputs]
    # what is no tensor: axes, shapes, limits. A signature may depend on them
    options = {key: value for key, value in arguments.items() if not any(map(_is_global, tree.flatten(value)))}
    call = OperatorCall(
        name,
        tuple(tensor.shape for tensor in inputs),
        tuple(tuple(output.shape) for output in outputs),
        options,
        tuple(key for key, leaf in leaves if isinstance(leaf, GlobalTensor)),
        dtypes=(*(tensor.dtype for tensor in inputs), *dtypes),
    )
    choice = _choose(call, inputs, dtypes)
    if (recorder := dry_run.recorder()) is not None:
        recorder.record_choice(call, choice)
    else:
        given = ", ".join(f"{x.dtype}{list(x.shape)} as ({_sbp.text(x.sbp)})" for x in inputs)
        meeting.note(f"kf.ops.{name} of {given}{f', {options}' if options else ''}")
    placement = inputs[0].placement
    boxed = [
        change_layout(tensor, Layout(placement, nd_sbp, tensor.shape))
        for tensor, nd_sbp in zip(inputs, choice.chosen.inputs, strict=True)
    ]
    layouts = [
        Layout(placement, nd_sbp, shape) for nd_sbp, shape in zip(choice.chosen.outputs, call.outputs, strict=True)
    ]

    def of_rank(rank: int) -> Callable[..., list]:
        before = [tensor.layout for tensor in boxed]
        return per_rank.function_of_rank(call, function, arguments, before, layouts, rank)

    results = compute_on_ranks(of_rank, inputs, boxed, layouts, dtypes)
    return tree.pack_sequence_as(described, results)


def _is_global(leaf: object) -> bool:
    return isinstance(leaf, GlobalTensor)


#: parameters of operators of two operands, which broadcast except in products of vectors
_OPERANDS = ("x1", "x2")
_PRODUCTS = frozenset(["dot", "inner", "tensordot", "vdot"])


def _arrays_made_global(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with numpy arrays beside global tensors made global, broadcast.

    A numpy number that is an operand keeps its dtype, which counts in promotion, as in `keras.ops`; 64 bits become 32,
    as in `kf.tensor`. Other numpy numbers (an axis, a limit of `clip`) become Python's. Numbers in a list of tensors
    are made global too: beside partial sums they must count once.

    Raises:
        FlowError: no global tensor among the arguments, or an array of the engine or a variable, of which no layout is
            known.
    """
    tensors = [leaf for leaf in tree.flatten(list(arguments.values())) if _is_global(leaf)]
    if not tensors:
        raise FlowError(
            f"kf.ops.{name} was given no global tensor; make one with kf.tensor(value, placement=..., sbp=...)"
        )
    placement = tensors[0].placement

    def made_global(key: str, is_listed: bool, leaf: Any) -> Any:
        if is_listed and isinstance(leaf, (int, float)):
            leaf = np.asarray(leaf)
        if not isinstance(leaf, (np.ndarray, np.generic)):
            if isinstance(leaf, keras.Variable) or keras.ops.is_tensor(leaf):
                raise FlowError(
                    f"kf.ops.{name} was given a {type(leaf).__name__}, which has no layout, beside global tensors. "
                    "kf.to_global(value, placement, sbp) makes one of what each rank holds, kf.global_tensor(variable) "
                    "one of a variable made under a scope"
                )
            return leaf
        if not leaf.ndim and not is_listed:
            if key not in _OPERANDS or name in _PRODUCTS:
                return leaf.item()
            # two scalars: both have a say in the dtype, as in keras.ops
            if not tensors[0].ndim:
                return leaf.astype(numpy_dtype(default_of_array(leaf)))[()]
            leaf = leaf.reshape(1)  # torch lets a tensor without dims have no say in the dtype of the result
        return creation.tensor(leaf, placement=placement, sbp=(_sbp.broadcast,) * placement.ndim)

    return {
        key: tree.map_structure(functools.partial(made_global, key, _has_tensors(value)), value)
        for key, value in arguments.items()
    }


def _has_tensors(value: object) -> bool:
    """Whether an argument is a list with global tensors."""
    return isinstance(value, (list, tuple)) and any(map(_is_global, tree.flatten(value)))


def _check_one_placement(name: str, inputs: Sequence[GlobalTensor]) -> None:
    first: Placement = inputs[0].placement
    for other in inputs[1:]:
        # ranks without a type have that of the job, as those with one do
        if (other.placement.ranks, other.placement.hierarchy) != (first.ranks, first.hierarchy):
            raise FlowError(
                f"kf.ops.{name} was given tensors on two placements: {first} and {other.placement}. Bring them "
                "together first, x.to_global(placement=...)"
            )


def _describe(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Shapes and dtypes of the results, as `KerasTensor`s, from those of the arguments; nothing is computed."""

    def symbol(leaf: Any) -> Any:
        return keras.KerasTensor(leaf.shape, leaf.dtype) if isinstance(leaf, GlobalTensor) else leaf

    symbols = {key: tree.map_structure(symbol, value) for key, value in arguments.items()}
    return keras_operators.call(function, symbols)


def _check_shapes_known(name: str, arguments: Mapping[str, Any], outputs: Sequence[Any]) -> None:
    """Refuse results whose shape depends on values: the layout has to be known before anything is computed."""
    is_coordinates = name == "where" and arguments.get("x1") is None  # of the places that are true: their number varies
    if not is_coordinates and all(isinstance(length, int) for output in outputs for length in output.shape):
        return
    advice = {
        "bincount": "kf.ops.sum(kf.ops.one_hot(x, n), axis=0) counts n values",
        "where": "give x1 and x2, which where chooses between",
    }.get(name, "compute it from x.numpy() on the host")
    raise FlowError(
        f"kf.ops.{name}: the shape of its result depends on the values of its input. Global tensors have shapes that "
        f"are known before: {advice}"
    )


# ---- the signature, chosen once for each call and layouts


def _choose(call: OperatorCall, inputs: Sequence[GlobalTensor], out_dtypes: Sequence[str]) -> Choice:
    # options may hold lists, which have no hash
    key = (call.name, call.inputs, call.outputs, repr(sorted(call.options.items())), call.names)
    layouts = tuple(tensor.layout for tensor in inputs)
    return _cached_choice(
        _HashableCall(key, call), layouts, tuple(tensor.dtype for tensor in inputs), tuple(out_dtypes)
    )


class _HashableCall:
    """A call with a hash of its own: options may be lists, which have none, so their text is hashed instead."""

    def __init__(self, key: tuple, call: OperatorCall):
        self.key, self.call = key, call

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashableCall) and self.key == other.key


@functools.lru_cache(maxsize=4096)  # a training loop repeats its calls; choosing takes longer than most operators
def _cached_choice(
    hashable: _HashableCall, layouts: tuple[Layout, ...], dtypes: tuple[str, ...], out_dtypes: tuple[str, ...]
) -> Choice:
    return choose(hashable.call, layouts, dtypes, out_dtypes)


# ---- computing


def compute_on_ranks(
    of_rank: Callable[[int], Callable[..., list]],
    inputs: Sequence[GlobalTensor],
    boxed: Sequence[GlobalTensor],
    layouts: Sequence[Layout],
    dtypes: Sequence[str],
) -> list[GlobalTensor]:
    """Compute on each rank of this process, and record it where gradients are asked for.

    Args:
        of_rank: rank -> function from its shards of `boxed` to its shards of the results.
        inputs: tensors that the program gave; gradients are added up for these.
        boxed: the same tensors in the layouts that `of_rank` needs.
        layouts: the layouts of the results.
        dtypes: the dtypes of the results.
    """
    placement = boxed[0].placement
    # by rank; those of ranks of other processes are not here
    shards: list[dict[int, Any]] = [{} for _ in layouts]
    pullbacks: dict[int, Callable[..., list]] = {}
    is_watched = tape.watches(inputs)
    if not dry_run.is_on():
        for rank in local_ranks():
            if not placement.contains(rank):
                continue
            compute = of_rank(rank)
            values = [tensor._shards[rank] for tensor in boxed]
            with tensor_engine().on_rank(rank):
                if is_watched:
                    computed, pullbacks[rank] = _with_pullback(compute, values, boxed, dtypes)
                else:
                    computed = compute(*values)
            for value, of_result, layout in zip(_as_promised(computed, dtypes), shards, layouts, strict=True):
                _check_shape(value, layout, rank)
                of_result[rank] = value
    results = [GlobalTensor(*parts) for parts in zip(layouts, dtypes, shards, strict=True)]
    if is_watched:
        tape.record_operator(inputs, boxed, results, pullbacks)
    return results


def _with_pullback(
    compute: Callable[..., list], values: Sequence[Any], inputs: Sequence[GlobalTensor], dtypes: Sequence[str]
) -> tuple[list, Callable[..., list]]:
    """The results on a rank, and the function from cotangents of its float results to those of its float inputs."""
    float_inputs = [place for place, tensor in enumerate(inputs) if is_float(tensor.dtype)]
    float_results = [place for place, dtype in enumerate(dtypes) if is_float(dtype)]

    def of_floats(*given: Any) -> list:
        # whole numbers among the inputs are constants to the derivative
        filled = list(values)
        for place, value in zip(float_inputs, given, strict=True):
            filled[place] = value
        results = compute(*filled)
        return [results[place] for place in float_results]

    floats, pullback = tensor_engine().vjp(of_floats, [values[place] for place in float_inputs])
    if len(float_results) == len(dtypes):
        return floats, pullback
    # whole numbers among the results (the indices of top_k) have no gradient: engines differentiate floats only
    results = compute(*values)
    for place, value in zip(float_results, floats, strict=True):
        results[place] = value
    return results, pullback


def _check_shape(value: Any, layout: Layout, rank: int) -> None:
    """Refuse a result that differs from its description: ranks would hold other elements than the layout says."""
    if tuple(value.shape) != layout.local_shape(rank):
        raise FlowError(
            f"an operator of Keras was described to give shape {list(layout.local_shape(rank))} on rank {rank}, of "
            f"{layout}, but computed {list(value.shape)}. Compose it of other operators of kf.ops, or report it to "
            "keras_flow"
        )


def _as_promised(values: Sequence[Any], dtypes: Sequence[str]) -> Iterator[Any]:
    """The values in the dtypes that `keras.ops` promises; some engines give 64 bits for 32 (numpy's `top_k`)."""
    for value, dtype in zip(values, dtypes, strict=True):
        yield value if keras.backend.standardize_dtype(value.dtype) == dtype else keras.ops.cast(value, dtype)
