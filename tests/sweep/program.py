"""Training a group of pieces as branches of one model, and comparing two such runs."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers as L

from tests.one_device import one_device
from tests.sweep.design import MESHES, PIPELINE, REMAT, ROWS, RULES, ZERO, Setting
from tests.sweep.piece import Piece

#: the update of a variable may differ from one device by this share of its largest element
UPDATE = 1e-4
#: outputs, losses and metrics, relative to their largest element
VALUE = 1e-5
#: updates are judged relative to at least this share of the largest update of their branch
ROUNDING = 1e-2
#: units of each branch's output
_UNITS = 4


@dataclass
class Numbers:
    """What a run of a group left behind.

    Attributes:
        updates: branch -> variable -> what two plain SGD steps added to it.
        values: branch -> name -> predictions before and after.
        losses: of the steps and of `evaluate`.
        notes: warnings of keras_flow, `Category: text`.
    """

    updates: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    values: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


#: of the sweep's own layers around a piece: their shapes, and that `Apply` is a layer of a user's own
_OF_THE_SWEEP = re.compile(r"branch\d+_(in|out)/|custom layer \(Apply\)")
#: of all branches alike
_OF_ROWS = re.compile(r"a batch of \d+ rows does not divide")


def sorted_out(notes: set[str], count: int) -> tuple[list[set[str]], set[str]]:
    """The notes of each of `count` branches, and those that name no branch.

    Counters are taken out, so that notes of several groups can be compared; notes of the sweep's own layers go.
    """
    own: list[set[str]] = [set() for _ in range(count)]
    of_any = set()
    for note in notes:
        if _OF_THE_SWEEP.search(note):
            continue
        text = re.sub(r"(branch\d+_piece/)?([a-z0-9_]+?)(_\d+)?(?=[/:' ])", r"\2", note.partition("\n")[0])[:300]
        branches = {int(number) for number in re.findall(r"branch(\d+)_", note)}
        if branches:
            for place in branches:
                own[place].add(text)
        elif _OF_ROWS.search(note):
            for mine in own:
                mine.add(text)
        else:
            of_any.add(text)
    return own, of_any


def distribution(setting: Setting) -> Any:
    """The distribution of a setting."""
    import keras_flow as kf

    ranks, axes, batch_axes = MESHES[setting.mesh]
    placement = kf.Placement(ranks, axis_names=axes)
    if setting.strategy == PIPELINE:
        return kf.PipelineParallel(placement, pipe_axis=axes[-1], batch_axes=axes[:-1], microbatches=3)
    asked: dict[str, Any] = {ZERO: {"zero": 3, "zero_min_size": 1}, REMAT: {"remat": [r"^branch\d"]}}.get(
        setting.strategy, {}
    )
    if setting.is_data_parallel:
        return kf.DataParallel(placement, strategy=None if asked else setting.strategy or None, **asked)
    dim = RULES[setting.rules]
    rules = None if dim is None else {"kernel|embeddings": {"model": kf.sbp.split(dim)}}
    return kf.ModelParallel(placement, rules=rules, batch_axes=batch_axes, **asked)


@contextlib.contextmanager
def draws_of(strategy: str) -> Iterator[None]:
    """Inside, draws are by logical index where a pipeline's are compared: by rows, whatever its micro-batches are."""
    given = {"KERAS_FLOW_RANDOM": "logical"} if strategy == PIPELINE else {}
    with mock.patch.dict(os.environ, given):
        yield


def run(pieces: Sequence[Piece], rows: str, chosen: Any = None) -> Numbers:
    """Train the pieces for two plain SGD steps, on one device (`chosen` None) or under a distribution."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    numbers = Numbers()
    with warnings.catch_warnings(record=True) as caught, chosen.scope() if chosen else one_device():
        warnings.simplefilter("always")
        model = _model(pieces)
        made = pieces[0].optimizer
        model.compile(made() if made else keras.optimizers.SGD(0.05), "mse", metrics=["mae", *_metrics(pieces)])
        x, y = _data(pieces, ROWS[rows])
        set_weights(model)
        if made:
            # stock Keras 3.15 on TensorFlow builds it while it traces the first step, where the slots of
            # ScheduleFreeAdamW, which start as the weights, stay zero; under a distribution it is built before
            model.optimizer.build(model.trainable_variables)
        before = _weights(model)
        first = model.predict_on_batch(x)
        for _ in range(5 if made else 2):
            numbers.losses += np.ravel(model.train_on_batch(x, y)).tolist()[:2]
        after = _weights(model)
        logs = model.evaluate(x, y, batch_size=ROWS[rows], verbose=0, return_dict=True)
        numbers.losses += [float(logs.pop(name)) for name in ("loss", "mae")]
        last = model.predict(x, batch_size=ROWS[rows], verbose=0)
    for place, piece in enumerate(pieces):
        prefix = _prefix(place)
        numbers.updates[piece.name] = {
            path.removeprefix(prefix + "_"): after[path] - before[path]
            for path in after
            if path.startswith(prefix + "_")
        }
        columns = slice(_UNITS * place, _UNITS * (place + 1))
        numbers.values[piece.name] = {"before": first[:, columns], "after": last[:, columns]}
        if piece.metric is not None:
            numbers.values[piece.name]["metric"] = np.asarray(logs[_prefix(place)])
    numbers.notes = sorted({f"{one.category.__name__}: {one.message}" for one in caught if _is_ours(one)})
    return numbers


def _is_ours(caught: warnings.WarningMessage) -> bool:
    from keras_flow.errors import FlowWarning

    return issubclass(caught.category, FlowWarning)


def _prefix(place: int) -> str:
    return f"branch{place}"


def _model(pieces: Sequence[Piece]) -> keras.Model:
    inputs, outputs = [], []
    for place, piece in enumerate(pieces):
        prefix = _prefix(place)
        x = L.Input(piece.shape, dtype="int32" if piece.kind == "int" else None, name=f"{prefix}_input")
        inputs.append(x)
        hidden = x
        if piece.kind != "int":
            activation = "sigmoid" if piece.kind == "image" else None
            hidden = L.Dense(piece.shape[-1], activation=activation, name=f"{prefix}_in")(x)
            if activation:  # some layers write into their images, and the sigmoid's gradient needs its own
                hidden = hidden * 1.0
        with _named(prefix):
            made = piece.connect(hidden)
        flat = [_cast(L.Flatten()(tensor)) for tensor in keras.tree.flatten(made)]
        flat = flat[0] if len(flat) == 1 else L.Concatenate()(flat)
        outputs.append(L.Dense(_UNITS, name=f"{prefix}_out")(flat))
    joined = outputs[0] if len(outputs) == 1 else L.Concatenate()(outputs)
    return keras.Model(inputs, joined)


def _metrics(pieces: Sequence[Piece]) -> list[Any]:
    """The metrics of the branches, each by its branch's name."""
    found = []
    for place, piece in enumerate(pieces):
        if piece.metric is not None:
            metric = piece.metric()
            metric.name, metric.columns = _prefix(place), slice(_UNITS * place, _UNITS * (place + 1))
            found.append(metric)
    return found


def _cast(tensor: Any) -> Any:
    return tensor if "float" in tensor.dtype else keras.ops.cast(tensor, keras.config.floatx())


@contextlib.contextmanager
def _named(prefix: str) -> Any:
    """Layers made inside have the branch's prefix, so that their variables are known by it."""
    with keras.name_scope(f"{prefix}_piece"):
        yield


def _data(pieces: Sequence[Piece], rows: int) -> tuple[list[np.ndarray], np.ndarray]:
    x = []
    for piece in pieces:
        random = np.random.default_rng(zlib.crc32(piece.name.encode()))
        shape = (rows, *piece.shape)
        if piece.kind == "int":
            x.append(random.integers(0, 10, shape).astype("int32"))
        elif piece.kind == "image":
            x.append(random.random(shape).astype(keras.config.floatx()))
        else:
            x.append(random.normal(size=shape).astype(keras.config.floatx()))
    y = np.random.default_rng(1).normal(size=(rows, _UNITS * len(pieces)))
    return x, y.astype(keras.config.floatx())


def set_weights(model: keras.Model) -> None:
    """Biases are not zero: a wrong gradient of something multiplied by zero would not show."""
    for variable in model.trainable_variables:
        value = np.asarray(keras.ops.convert_to_numpy(variable))
        if not value.any():
            random = np.random.default_rng(value.size)
            variable.assign((0.1 * random.normal(size=value.shape)).astype(value.dtype))


def _weights(model: keras.Model) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for variable, value in zip(model.weights, model.get_weights(), strict=True):
        if np.asarray(value).dtype.kind == "f":
            out[variable.path] = np.asarray(value, "float64")
    return out


def weights_by_place(model: keras.Model) -> dict[str, np.ndarray]:
    """Floating-point weights by place and path: layers of a user's own may share a path."""
    return {
        f"{place} {variable.path}": np.asarray(value, "float64")
        for place, (variable, value) in enumerate(zip(model.weights, model.get_weights(), strict=True))
        if np.asarray(value).dtype.kind == "f"
    }


def compare(reference: Numbers, found: Numbers) -> dict[str, dict[str, float]]:
    """branch -> what is off -> its share of the tolerance; empty where the numbers are those of one device."""
    over: dict[str, dict[str, float]] = {}
    for branch, updates in reference.updates.items():
        # an update that is zero in mathematics is rounding: it is judged by a share of the branch's largest
        least = ROUNDING * max(float(np.max(np.abs(update), initial=0.0)) for update in updates.values())
        shares = {
            f"update {path}": share_of_tolerance(update, found.updates[branch].get(path), UPDATE, least)
            for path, update in updates.items()
        }
        for name, value in reference.values[branch].items():
            shares[f"predictions {name}"] = share_of_tolerance(
                value, found.values[branch][name], VALUE * (10 if name == "after" else 1)
            )
        over[branch] = {name: share for name, share in shares.items() if not share <= 1.0}
    bad = [
        share_of_tolerance(np.float64(a), np.float64(b), VALUE)
        for a, b in zip(reference.losses, found.losses, strict=True)
    ]
    if all(not branch for branch in over.values()) and any(not share <= 1.0 for share in bad):
        over[next(iter(over))]["loss and metrics"] = max(bad)
    return over


def share_of_tolerance(a: np.ndarray, b: np.ndarray | None, tolerance: float, least: float = 0.0) -> float:
    """The largest |a - b| as a share of what is allowed; infinite, or no number, where they cannot be compared.

    Args:
        a: what one device gave.
        b: what was found; None for nothing.
        tolerance: relative to the largest |a|, or to `least` where that is more.
        least: see `tolerance`.
    """
    if b is None or np.shape(a) != np.shape(b):
        return float("inf")
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    same_nan = np.isnan(a) & np.isnan(b)
    a, b = np.where(same_nan, 0, a), np.where(same_nan, 0, b)
    if a.size == 0 or np.array_equal(a, b):
        return 0.0
    scale = max(float(np.max(np.abs(a))), least)
    return float(np.max(np.abs(a - b)) / (tolerance * scale)) if scale else float("inf")
