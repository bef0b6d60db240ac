"""What `row_interaction` believes of a layer, held to what the layer computes: without ranks, on one device.

A layer that is believed to act row by row must give the rows of a part alone what it gives them within the whole, and
assign the same state for every part. Each of Keras's public layers is asked as it is, and after everything that changes
what a layer computes: quantization, policies of dtypes, LoRA, another `call`, activation, class or wrapper.
"""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers as L
from keras import ops

from keras_flow.backends import states
from keras_flow.backends.row_wise import row_interaction
from tests.sweep.cases import layers as cases
from tests.sweep.piece import Piece

#: rows of the whole, and where it is cut; each part has more than one row, as a part of one is often a case of its own
ROWS, CUT = 6, 2
#: what a row may differ by, relative to the largest element: kernels sum in another order for other shapes
_TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
#: what hooks make exact in training, where rows do interact: statistics of the batch
_TREATED = ("BatchNormalization",)
PIECES = [piece for piece in cases.PIECES if piece.metric is None and piece.optimizer is None]


@dataclass
class Found:
    """What a change of a layer showed.

    Attributes:
        applies: whether the piece has a layer that can be changed so.
        believed: names of the layers that were believed to act row by row.
        wrong: of these, what was computed otherwise.
    """

    applies: bool = False
    believed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


# ---- changes: each is given the layers of a model, and returns those that it changed


def _mixed(value: Any) -> Any:
    """Each row minus the mean over the rows."""
    return value - ops.mean(value, axis=0, keepdims=True) if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype))


def _mixing(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)  # as who patches does: its name and module say nothing
    def mixing(*args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(_mixed, call(*args, **kwargs))

    return mixing


def _quantized(mode: Any) -> Callable[[list[Any]], list[Any]]:
    def change(layers: list[Any]) -> list[Any]:
        inner = [part for layer in layers for part in layer._flatten_layers()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part in inner:
                if len(list(part._flatten_layers())) == 1:
                    with contextlib.suppress(NotImplementedError, ValueError):
                        given = {"mode": mode} if isinstance(mode, str) else {"config": mode()}
                        part.quantize(**given)
        return [layer for layer in layers if any(part.quantization_mode for part in layer._flatten_layers())]

    return change


def _int8_by_columns() -> Any:
    from keras.src.quantizers import AbsMaxQuantizer, quantization_config

    return quantization_config.Int8QuantizationConfig(activation_quantizer=AbsMaxQuantizer(axis=0))


def _with_lora(layers: list[Any]) -> list[Any]:
    able = [part for layer in layers for part in layer._flatten_layers() if hasattr(part, "enable_lora")]
    for part in able:
        with contextlib.suppress(ValueError, NotImplementedError):
            part.enable_lora(2)
            part.lora_kernel_b.assign(np.ones(part.lora_kernel_b.shape)) if hasattr(part, "lora_kernel_b") else None
    return [layer for layer in layers if any(getattr(part, "lora_enabled", False) for part in layer._flatten_layers())]


def _with_another_call(layers: list[Any]) -> list[Any]:
    for layer in layers:
        layer.call = _mixing(layer.call)
    return layers


def _with_an_inner_call(layers: list[Any]) -> list[Any]:
    """The `call` of a layer inside, of a projection or a cell."""
    inner = [(layer, part) for layer in layers for part in layer._layers]
    for _, part in inner:
        part.call = _mixing(part.call)
    return [layer for layer, _ in inner]


def _of_a_subclass(layers: list[Any]) -> list[Any]:
    for layer in layers:
        kind = type(layer)
        # of the same name, which is what a table would be asked for
        layer.__class__ = type(kind.__name__, (kind,), {"call": _mixing(kind.call), "__module__": __name__})
    return layers


def _with_activation(function: Callable[[], Any]) -> Callable[[list[Any]], list[Any]]:
    def change(layers: list[Any]) -> list[Any]:
        parts = [part for layer in layers for part in layer._flatten_layers()]
        changed = [part for part in parts if callable(vars(part).get("activation"))]
        for part in changed:
            part._tracker.unlock()
            part.activation = function()
            part._tracker.lock()
        return [layer for layer in layers if any(part in changed for part in layer._flatten_layers())]

    return change


def _with_another_axis(layers: list[Any]) -> list[Any]:
    """An attribute is set on a layer that is built: it works along the rows now."""
    changed = [layer for layer in layers if isinstance(getattr(layer, "axis", None), int)]
    changed = [layer for layer in changed if not layer.weights and type(layer).__name__ in ("Softmax", "Concatenate")]
    for layer in changed:
        layer.axis = 0
    return changed


def _with_policy(name: str) -> Callable[[list[Any]], list[Any]]:
    """The policy of dtypes is set on a layer that is built."""

    def change(layers: list[Any]) -> list[Any]:
        changed = [layer for layer in layers if len(list(layer._flatten_layers())) == 1]
        for layer in changed:
            with contextlib.suppress(NotImplementedError, ValueError):  # Keras quantizes some layers only
                layer.dtype_policy = name
        return [layer for layer in changed if layer.dtype_policy.name == name]

    return change


#: name -> what it changes, on a layer that is built
CHANGES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "as it is": lambda layers: layers,
    "int8": _quantized("int8"),
    "int4": _quantized("int4"),
    "float8": _quantized("float8"),
    "int8 by columns": _quantized(_int8_by_columns),
    "LoRA": _with_lora,
    "another call": _with_another_call,
    "an inner call": _with_an_inner_call,
    "a subclass": _of_a_subclass,
    "another axis": _with_another_axis,
    "another policy": _with_policy("mixed_bfloat16"),
    "a quantized policy": _with_policy("float8_from_float32"),
    "a mixing activation": _with_activation(lambda: _mixed),
    "an activation that looks like Keras's": _with_activation(lambda: _mixing(keras.activations.tanh)),
    "softmax over rows": _with_activation(lambda: functools.partial(keras.activations.softmax, axis=0)),
    "a layer as activation": _with_activation(lambda: L.Softmax(axis=0)),
    "an operation as activation": _with_activation(lambda: ops.flip),
}
#: policies under which a layer is made
POLICIES = ("mixed_float16", "mixed_bfloat16", "float8_from_float32", "int8_from_float32")
ALL = (*CHANGES, *POLICIES, "a patched class")


# ---- what is believed and what is computed


def found(piece: Piece, change: str) -> Found:
    """Change the layers of a piece so, and hold what is believed of them to what they compute."""
    result = Found()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, x = _model(piece, change if change in POLICIES else "float32")
            calls = _calls(model, x)
        except Exception:  # of Keras: a layer that cannot be made with this policy, or not be called
            if change not in POLICIES:
                raise
            return result
        if change == "a patched class":
            kinds = {type(layer) for layer, _ in calls if type(layer).__module__.startswith("keras.")}
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(unittest.mock.patch.object(kind, "call", _mixing(kind.call)))
                _hold([(layer, inputs) for layer, inputs in calls if type(layer) in kinds], change, result)
            return result
        for layer, inputs in calls:  # a belief that is held on to is one of the faults that are looked for
            row_interaction.of_call(layer, (inputs,), {})
        changed = CHANGES.get(change, CHANGES["as it is"])([layer for layer, _ in calls])
        _hold([(layer, inputs) for layer, inputs in calls if any(layer is one for one in changed)], change, result)
    return result


def _hold(calls: list[tuple[Any, Any]], change: str, result: Found) -> None:
    for layer, inputs in calls:
        result.applies = True
        for training in (False, True):
            if row_interaction.of_call(layer, (inputs,), {}) is not None:
                continue
            name = f"{layer.name} ({type(layer).__name__}), {change}, training={training}"
            result.believed.append(name)
            try:
                text = _difference(layer, inputs, training)
            except Exception as error:  # of Keras: the layer has no such quantization, or cannot compute in the dtype
                if change not in (*POLICIES, "int8", "int4") and not isinstance(error, NotImplementedError):
                    raise
                return
            if text:
                result.wrong.append(f"{name}: {text}")


def _difference(layer: Any, inputs: Any, training: bool) -> str:
    """How the rows of parts differ from those of the whole; empty where they do not."""
    kinds = {type(part).__name__ for part in layer._flatten_layers()}
    if training and (kinds & set(_TREATED) or any(part._seed_generators for part in layer._flatten_layers())):
        return ""
    before = _state(layer)
    whole, of_whole = _outputs(layer, inputs, training, before)
    parts = [slice(0, CUT), slice(CUT, ROWS)]
    found = [_outputs(layer, _cut(inputs, part), training, before) for part in parts]
    for index, value in enumerate(whole):
        joined = [each[index] for each, _ in found]
        if any(one.shape[:1] != (part.stop - part.start,) for one, part in zip(joined, parts, strict=True)):
            return f"outputs of shape {[one.shape for one in joined]}"
        tolerance = max(_TOLERANCE.get(keras.backend.standardize_dtype(layer.compute_dtype), 0), 2e-5)
        off = np.max(np.abs(np.concatenate(joined) - value), initial=0) / max(np.max(np.abs(value), initial=0), 1e-6)
        if not off <= tolerance:
            return f"rows differ by {off:.1e}"
    for path, value in of_whole.items():
        if any(not np.array_equal(value, state[path], equal_nan=True) for _, state in found):
            return f"state {path} differs"
    return ""


def _outputs(layer: Any, inputs: Any, training: bool, state: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The outputs, and the state that the call and its gradient have assigned, from the same state."""
    for variable in layer.variables:
        if variable.path in state:
            variable.assign(state[variable.path])
        variable.value.grad = None
    takes_training = "training" in layer._call_signature.parameters
    outputs = layer(inputs, **({"training": training} if takes_training else {}))
    flat = [value for value in keras.tree.flatten(outputs) if value is not None]
    if training and any(value.requires_grad for value in flat):
        sum(ops.sum(ops.cast(value, "float32")) for value in flat if value.requires_grad).backward()
    assigned = _state(layer)
    for variable in layer.trainable_variables:
        # in the optimizer's step this becomes its value
        if states.is_overwritten(variable) and variable.value.grad is not None:
            assigned[f"gradient of {variable.path}"] = ops.convert_to_numpy(variable.value.grad).copy()
    return [np.asarray(ops.convert_to_numpy(ops.cast(value, "float32"))) for value in flat], assigned


def _state(layer: Any) -> dict[str, Any]:
    """All variables by path: a call may assign trained ones too, as SpectralNormalization does."""
    return {variable.path: ops.convert_to_numpy(variable.value).copy() for variable in layer.variables}


def _cut(inputs: Any, part: slice) -> Any:
    return keras.tree.map_structure(lambda value: value[part], inputs)


# ---- models


def _model(piece: Piece, policy: str = "float32") -> tuple[Any, Any]:
    """The piece alone behind an input, with weights that are not zero, and rows for it."""
    keras.utils.set_random_seed(5)
    # what has weights for rows needs their number
    rows = ROWS if "rows" in piece.name else None
    inputs = keras.Input(batch_shape=(rows, *piece.shape), dtype="int32" if piece.kind == "int" else "float32")
    with _policy(policy):
        outputs = piece.connect(inputs)
    model = keras.Model(inputs, outputs)
    random = np.random.default_rng(2)
    for variable in model.trainable_variables:
        value = ops.convert_to_numpy(variable.value)
        if not value.any() and not states.is_overwritten(variable):
            variable.assign((0.3 * random.normal(size=value.shape)).astype(value.dtype))
    shape = (ROWS, *piece.shape)
    if piece.kind == "int":
        return model, random.integers(0, 10, shape).astype("int32")
    if piece.kind == "image":
        return model, random.random(shape).astype("float32")
    x = random.normal(size=shape).astype("float32")
    x[-1] *= 3  # the largest element is in the last part
    return model, x


def _calls(model: Any, x: Any) -> list[tuple[Any, Any]]:
    """Each layer of a model with its inputs; layers that take them by several names are left out."""
    found = []
    for layer in model.layers:
        node = layer._inbound_nodes[-1]
        if (
            isinstance(layer, L.InputLayer)
            or len(node.arguments.args) != 1
            or node.arguments.kwargs.get("mask") is not None
        ):
            continue
        if len(keras.tree.flatten(node.arguments.args[0])) != len(node.input_tensors):
            continue
        values = keras.Model(model.inputs, node.arguments.args[0])(ops.convert_to_tensor(x))
        found.append((layer, keras.tree.map_structure(lambda value: value.detach(), values)))
    return found


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _in_time(name: str, make: Callable[[], Any], shape: tuple[int, ...], kind: str = "float") -> Piece:
    return Piece(f"layers.TimeDistributed[{name}]", lambda x: L.TimeDistributed(make())(x), (2, *shape), kind)


class Around(L.Wrapper):
    """A wrapper of a user's own."""

    def call(self, x: Any) -> Any:
        return self.layer(x)


class _Cell(L.SimpleRNNCell):
    """A cell of a user's own, which looks at all rows."""

    def call(self, sequence: Any, states: Any, training: bool = False) -> Any:
        output, states = super().call(sequence, states, training=training)
        return _mixed(output), states


#: layers within layers, and options, that the sweep has no piece for
WRAPPED = (
    _in_time("Dense", lambda: L.Dense(4, "tanh"), (8,)),
    _in_time("BatchNormalization", lambda: L.BatchNormalization(), (8,)),
    _in_time("LayerNormalization over rows", lambda: L.LayerNormalization(axis=-2), (8,)),
    _in_time("Softmax over rows", lambda: L.Softmax(axis=-2), (8,)),
    _in_time("MelSpectrogram", lambda: L.MelSpectrogram(16, 4, 8, sampling_rate=100, max_freq=50, min_freq=1), (64,)),
    _in_time("own code", lambda: L.Lambda(_mixed), (8,)),
    Piece("layers.Bidirectional[GRU]", lambda x: L.Bidirectional(L.GRU(3))(x), (4, 8)),
    Piece("layers.RNN[own cell]", lambda x: L.RNN(_Cell(3))(x), (4, 8)),
    Piece("layers.Wrapper[own]", lambda x: Around(L.Dense(3))(x)),
    Piece("layers.MultiHeadAttention[itself]", lambda x: L.MultiHeadAttention(2, 4)(x, x), (4, 8)),
    Piece("layers.SpectralNormalization[conv]", lambda x: L.SpectralNormalization(L.Conv1D(3, 2))(x), (6, 4)),
    Piece("layers.LayerNormalization[rows]", lambda x: L.LayerNormalization(axis=0)(x)),
    Piece("layers.Softmax[rows]", lambda x: L.Softmax(axis=-2)(x)),
    Piece("layers.UnitNormalization[rows]", lambda x: L.UnitNormalization(axis=-2)(x)),
    Piece("layers.RMSNormalization[rows]", lambda x: L.RMSNormalization(axis=-2)(x)),
    Piece("layers.Normalization[rows]", lambda x: L.Normalization(axis=0, mean=0.0, variance=1.0)(x)),
    Piece("layers.Rescaling[rows]", lambda x: L.Rescaling(np.arange(1.0, ROWS + 1)[:, None])(x)),
    Piece("layers.Attention[vectors]", lambda x: L.Attention()([x, x])),
    Piece("layers.EinsumDense[rows]", lambda x: L.EinsumDense("bf,fg->gb", (ROWS,))(x)),
    Piece("layers.Sequential", lambda x: keras.Sequential([L.Dense(4, "relu"), L.BatchNormalization()])(x)),
)


def of_one_sample() -> list[str]:
    """Layers of images that are given one image are believed to act by its first dim: none may be."""
    wrong = []
    for piece in PIECES:
        if piece.kind != "image":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, x = _model(piece)
        for layer in model.layers[1:2]:  # the rest makes no image
            if row_interaction.of_call(layer, (ops.convert_to_tensor(x[0]),), {}) is None:
                wrong.append(piece.name)
    return wrong


def report(pieces: Sequence[Piece], changes: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """For each change in how many pieces it applies, and how many layers are believed; and the beliefs that are wrong.

    Args:
        pieces: what is changed.
        changes: names of changes.
    """
    counts: dict[str, int] = {}
    wrong: list[str] = []
    for piece in pieces:
        for change in changes:
            keras.utils.clear_session()
            result = found(piece, change)
            counts[f"{change}, applies"] = counts.get(f"{change}, applies", 0) + result.applies
            counts[f"{change}, believed"] = counts.get(f"{change}, believed", 0) + len(result.believed)
            wrong += [f"{piece.name}: {text}" for text in result.wrong]
    return counts, wrong
