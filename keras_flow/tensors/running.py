"""Running an operator: choose a signature, lay the inputs so, compute on each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_flow import sbp as _sbp
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.signatures import Call, Choice, choose
from keras_flow.tensors import engine, gradients, local
from keras_flow.tensors.global_tensor import GlobalTensor, is_described, relay, watcher


def run(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The result of an operator, with the structure that `function` gives it.

    Args:
        name: row of the table of signatures.
        function: computes it on arrays of the engine, all arguments by position or name as in `arguments`.
        arguments: parameter -> value; global tensors, or lists of them, among other values.

    Raises:
        FlowError: tensors on different placements, or none at all.
    """
    from keras import tree

    tensors = _as_tensors(name, arguments)
    leaves = [(key, leaf) for key, value in tensors.items() for leaf in tree.flatten(value)]
    inputs = [leaf for _, leaf in leaves if isinstance(leaf, GlobalTensor)]
    _check_one_placement(name, inputs)
    described = _describe(function, tensors)
    outputs = tree.flatten(described)
    _check_known(name, tensors, outputs)
    options = {key: value for key, value in tensors.items() if not any(map(_is_global, tree.flatten(value)))}
    call = Call(
        name,
        tuple(one.shape for one in inputs),
        tuple(tuple(one.shape) for one in outputs),
        options,
        tuple(key for key, leaf in leaves if isinstance(leaf, GlobalTensor)),
    )
    choice = _choose(call, inputs, [one.dtype for one in outputs])
    if (watching := watcher()) is not None:
        watching.chosen(call, choice)
    else:
        given = ", ".join(f"{one.dtype}{list(one.shape)} as ({_sbp.text(one.sbp)})" for one in inputs)
        engine.tensor_engine().note_call(f"kf.ops.{name} of {given}{f', {options}' if options else ''}")
    results = _compute(call, choice, function, tensors, inputs, [one.dtype for one in outputs])
    return tree.pack_sequence_as(described, results)


def _check_known(name: str, arguments: Mapping[str, Any], outputs: Sequence[Any]) -> None:
    """Refuse results whose shape depends on values: a layout says before anything is computed what each rank holds."""
    places = name == "where" and arguments.get("x1") is None  # the coordinates of what is true
    if not places and all(isinstance(length, int) for one in outputs for length in one.shape):
        return
    advice = {
        "bincount": "kf.ops.sum(kf.ops.one_hot(x, n), axis=0) counts n values",
        "where": "give x1 and x2, which where chooses between",
    }.get(name, "compute it from x.numpy() on the host")
    raise FlowError(
        f"kf.ops.{name}: the shape of its result depends on the values of its input. Global tensors have shapes that "
        f"are known before: {advice}"
    )


def _compute(
    call: Call,
    choice: Choice,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    inputs: Sequence[GlobalTensor],
    dtypes: Sequence[str],
) -> list[GlobalTensor]:
    placement = inputs[0].placement
    laid = [
        relay(one, Layout(placement, wanted, one.shape))
        for one, wanted in zip(inputs, choice.chosen.inputs, strict=True)
    ]
    layouts = [
        Layout(placement, nd_sbp, shape) for nd_sbp, shape in zip(choice.chosen.outputs, call.outputs, strict=True)
    ]

    def of_rank(rank: int) -> Callable[..., list]:
        return local.function(call, function, arguments, [one.layout for one in laid], layouts, rank)

    return on_ranks(of_rank, inputs, laid, layouts, dtypes)


def on_ranks(
    of_rank: Callable[[int], Callable[..., list]],
    inputs: Sequence[GlobalTensor],
    laid: Sequence[GlobalTensor],
    layouts: Sequence[Layout],
    dtypes: Sequence[str],
) -> list[GlobalTensor]:
    """Compute on each rank of this process, and note it on the tape.

    Args:
        of_rank: rank -> the function of its shards that returns those of the results.
        inputs: what was given; the tape differentiates by it.
        laid: the same, as the function needs it.
        layouts: of the results.
        dtypes: of the results.
    """
    placement = laid[0].placement
    shards: list[dict[int, Any]] = [{} for _ in layouts]
    pullbacks: dict[int, Callable[..., list]] = {}
    is_taped = gradients.is_taped(inputs)
    if not is_described():
        for rank in engine.local_ranks():
            if not placement.contains(rank):
                continue
            compute = of_rank(rank)
            values = [one._shards[rank] for one in laid]
            with engine.on_rank(rank):
                if is_taped:
                    found, pullbacks[rank] = gradients.differentiated(compute, values, laid, dtypes)
                else:
                    found = compute(*values)
            for value, held, layout in zip(_cast(found, dtypes), shards, layouts, strict=True):
                _check_described(value, layout, rank)
                held[rank] = value
    results = [GlobalTensor(layout, dtype, held) for layout, dtype, held in zip(layouts, dtypes, shards, strict=True)]
    if is_taped:
        gradients.note(inputs, laid, results, pullbacks)
    return results


def _check_described(value: Any, layout: Layout, rank: int) -> None:
    """Refuse what is computed otherwise than it was described: ranks would hold other elements than the layout says."""
    if tuple(value.shape) != layout.local_shape(rank):
        raise FlowError(
            f"an operator of Keras was described to give shape {list(layout.local_shape(rank))} on rank {rank}, of "
            f"{layout}, but computed {list(value.shape)}. Compose it of other operators of kf.ops, or report it to "
            "keras_flow"
        )


def _cast(values: Sequence[Any], dtypes: Sequence[str]) -> Iterator[Any]:
    """As `keras.ops` says: some engines give 64 bits where it promises 32 (numpy's `top_k`)."""
    import keras

    for value, dtype in zip(values, dtypes, strict=True):
        yield value if keras.backend.standardize_dtype(value.dtype) == dtype else keras.ops.cast(value, dtype)


def _is_global(leaf: object) -> bool:
    return isinstance(leaf, GlobalTensor)


#: parameters of operators of two operands, which broadcast but in products of vectors
_OPERANDS = ("x1", "x2")
_PRODUCTS = frozenset(["dot", "inner", "tensordot", "vdot"])


def _as_tensors(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with numpy arrays beside global tensors made global, whole on every rank.

    A numpy number that is an operand keeps its dtype, which counts in promotion, as in `keras.ops`; 64 bits become 32,
    as those of `kf.tensor`. Others (an axis, a limit of `clip`) are Python's.
    """
    from keras import tree

    from keras_flow.tensors import creation

    leaves = [leaf for leaf in tree.flatten(list(arguments.values())) if _is_global(leaf)]
    if not leaves:
        raise FlowError(
            f"kf.ops.{name} was given no global tensor; make one with kf.tensor(value, placement=..., sbp=...)"
        )
    placement = leaves[0].placement

    def one(key: str, leaf: Any) -> Any:
        if not isinstance(leaf, (np.ndarray, np.generic)):
            return leaf
        if not leaf.ndim:
            if key not in _OPERANDS or name in _PRODUCTS:
                return leaf.item()
            if not leaves[0].ndim:
                return leaf.astype(engine.numpy_dtype(creation.dtype_of(leaf)))[()]
            leaf = leaf.reshape(1)  # torch promotes no array to the dtype of one without dims
        return creation.tensor(leaf, placement=placement, sbp=(_sbp.broadcast,) * placement.ndim)

    return {key: tree.map_structure(functools.partial(one, key), value) for key, value in arguments.items()}


def _check_one_placement(name: str, inputs: Sequence[GlobalTensor]) -> None:
    first: Placement = inputs[0].placement
    for other in inputs[1:]:
        if other.placement != first:
            raise FlowError(
                f"kf.ops.{name} was given tensors on two placements: {first} and {other.placement}. Bring them "
                "together first, x.to_global(placement=...)"
            )


def _describe(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Shapes and dtypes of the results, from those of the arguments; nothing is computed."""
    import keras
    from keras import tree

    def symbol(leaf: Any) -> Any:
        return keras.KerasTensor(leaf.shape, leaf.dtype) if isinstance(leaf, GlobalTensor) else leaf

    described = {key: tree.map_structure(symbol, value) for key, value in arguments.items()}
    return local.called(function, described)


def _choose(call: Call, inputs: Sequence[GlobalTensor], out_dtypes: Sequence[str]) -> Choice:
    key = (call.name, call.inputs, call.outputs, repr(sorted(call.options.items())), call.names)
    layouts = tuple(one.layout for one in inputs)
    return _cached_choice(_Keyed(key, call), layouts, tuple(one.dtype for one in inputs), tuple(out_dtypes))


class _Keyed:
    """A call that is hashed by a text of its options, which may be lists."""

    def __init__(self, key: tuple, call: Call):
        self.key, self.call = key, call

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.key == other.key


@functools.lru_cache(maxsize=4096)
def _cached_choice(
    keyed: _Keyed, layouts: tuple[Layout, ...], dtypes: tuple[str, ...], out_dtypes: tuple[str, ...]
) -> Choice:
    return choose(keyed.call, layouts, dtypes, out_dtypes)
