"""What a random model goes through, on one device and under a random layout, and the comparison of the two."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.active import backend
from tests.fuzz import around, further
from tests.fuzz.random_models import Drawn, draw, is_for_a_pipeline
from tests.one_device import one_device
from tests.sweep.program import ROUNDING, UPDATE, VALUE, set_weights, share_of_tolerance, weights_by_place

#: predictions and losses that follow from trained weights
AFTER = 1e-4

Make = Callable[[], Any]


@dataclass
class Numbers:
    """What one run gave.

    Attributes:
        updates: variable -> what three steps added.
        values: name -> number, and its tolerance.
    """

    updates: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, tuple[np.ndarray, float]] = field(default_factory=dict)

    @property
    def has_nan(self) -> bool:
        """Whether any number is none."""
        arrays = [*self.updates.values(), *(value for value, _ in self.values.values())]
        return any(np.isnan(array).any() for array in arrays if array.dtype.kind == "f")


@dataclass
class Setting:
    """Where a model is trained.

    Attributes:
        first, second: make the distribution of the training, and of the loading afterwards.
        rows, batch: rows of the data and of a batch.
        text: all of it in a line.
    """

    first: Make
    second: Make
    rows: int
    batch: int
    text: str


def setting(seed: str, ranks: int) -> Setting:
    """A random mesh with random rules, another one for loading, and a number of rows.

    Args:
        seed: of the model.
        ranks: of the job.
    """
    keras.utils.clear_session()
    shapes = {variable.path: tuple(variable.shape) for variable in draw(seed, 1).model.trainable_variables}
    drawn = random.Random(f"{seed} setting")
    if is_for_a_pipeline(seed):
        (first, one), batch = _pipeline(drawn, ranks, len({path.rpartition("/")[0] for path in shapes}))
    else:
        first, one = _distribution(drawn, ranks, shapes, saves_memory(seed))
        batch = 0
    second, other = _distribution(drawn, ranks, shapes)
    batch = batch or drawn.choice([1, 2, 3, 4, 6, 7, 8, 8, 12])
    rows = 2 * batch + drawn.choice([batch, max(1, batch - 1), 1])
    return Setting(first, second, rows, batch, f"{rows} rows in batches of {batch}; {one}; loaded under {other}")


def _pipeline(drawn: random.Random, ranks: int, layers: int) -> tuple[tuple[Make, str], int]:
    """A pipeline of so many stages at most, and rows for each of its micro-batches."""
    shapes = [shape for shape in ((2,), (3,), (4,), (2, 2), (2, 1)) if shape[0] <= layers]
    if backend().capabilities.drives_all_ranks:
        shape = drawn.choice(shapes or [(1, 2)])
    else:  # a process for each rank, which all take part
        shape = drawn.choice([shape for shape in shapes if np.prod(shape) == ranks] or [(ranks,)])
    chosen = np.reshape(drawn.sample(range(ranks), int(np.prod(shape))), shape).tolist()
    schedule = drawn.choice(["gpipe", "1f1b", "zb1p", *(["interleaved", "zbv"] if 2 * shape[0] <= layers else [])])
    parts = drawn.choice([3, 4]) if schedule != "interleaved" else drawn.choice([1, 2]) * shape[0]
    remat = drawn.choice([None, None, "stage", "stage"])  # "block" needs repeated blocks, which are rare here
    placement = kf.Placement(chosen, axis_names=("pipe", "data")[: len(shape)])
    text = f"PipelineParallel {chosen} {schedule} microbatches={parts} remat={remat}"

    def make() -> kf.PipelineParallel:
        return kf.PipelineParallel(placement, schedule=schedule, microbatches=parts, remat=remat)

    return (make, text), parts + drawn.choice([0, 1, 1, 3, 5])


def saves_memory(seed: str) -> bool:
    """Whether weights, gradients or slots are split further (`zero=`), or layers are computed again (`remat=`)."""
    return seed.startswith("z")


def _memory(drawn: random.Random, variables: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Random `zero=` and `remat=`, one of them at least."""
    layers = sorted({path.rpartition("/")[0] for path in variables})
    zero = {"zero": drawn.choice([1, 2, 3, 3]), "zero_min_size": drawn.choice([1, 1, 8])}
    remat = {"remat": [f"^{path}$" for path in drawn.sample(layers, min(len(layers), drawn.choice([1, 2, 9])))]}
    return drawn.choice([zero, zero, remat, {**zero, **remat}])


def _distribution(
    drawn: random.Random, ranks: int, variables: dict[str, tuple[int, ...]], saving: bool = False
) -> tuple[Make, str]:
    memory = _memory(drawn, variables) if saving else {}
    shapes = [(ranks,), (4,), (2, 2), (1, 4), (4, 1), (2, 1, 2), (3,), (1, 2), (2,), (1, 3), (3, 1)]
    if ranks >= 8:
        shapes += [(2, 4), (4, 2), (2, 2, 2), (2, 3), (5,), (7,), (3, 2)]
    shape = drawn.choice(shapes)
    chosen = drawn.sample(range(ranks), int(np.prod(shape)))
    if drawn.random() < 0.6:
        chosen.sort()
    names = ("data", "model", "third")[: len(shape)]
    placement = kf.Placement(np.reshape(chosen, shape).tolist(), axis_names=names)
    text = f"{np.reshape(chosen, shape).tolist()}" + "".join(f" {name}={value}" for name, value in memory.items())
    if len(shape) == 1 and drawn.random() < 0.7:
        if keras.backend.backend() == "tensorflow" and not memory and drawn.random() < 0.3:
            return lambda: kf.DataParallel(placement, strategy="mirrored"), f"DataParallel mirrored {text}"
        return lambda: kf.DataParallel(placement, **memory), f"DataParallel {text}"
    batch_axes = names[: drawn.choice([1, 1, min(2, len(names))])]
    if len(names) == 1:
        batch_axes = drawn.choice([("data",), ()])
    split_axes = [name for name in names if name not in batch_axes] or list(names)
    share = drawn.choice([0.2, 0.5, 0.9])
    rules = {
        f"^{path}$": {drawn.choice(split_axes): kf.sbp.split(drawn.randrange(len(shape)))}
        for path, shape in variables.items()
        if shape and drawn.random() < share
    }
    text = f"ModelParallel {text} batch_axes={batch_axes} rules={rules}"
    return lambda: kf.ModelParallel(placement, rules=rules, batch_axes=batch_axes, **memory), text


def run(seed: str, ranks: int, distributed: bool) -> tuple[Numbers, Drawn]:
    """Train, evaluate, predict, save, and load under another layout.

    Args:
        seed: of the model and the setting.
        ranks: of the job.
        distributed: under the setting; else on one device.
    """
    chosen = setting(seed, ranks)
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    numbers = Numbers()
    beside, then = around.drawn_for(seed), further.drawn_for(seed)
    drawn = draw(seed, chosen.rows) if beside.model_before else None
    objects = [keras.metrics.MeanAbsoluteError(name="early")] if beside.metrics_before else None
    scope = chosen.first() if distributed else None
    with scope.scope() if scope else one_device():
        drawn = drawn or draw(seed, chosen.rows)
        model = drawn.model
        options = drawn.compile
        if objects and options.get("metrics") == ["mae"]:
            options = {**options, "metrics": objects}
        # slots that are split must be seen in the updates
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9 if saves_memory(seed) else 0.0), **options)
        set_weights(model)
        before = weights_by_place(model)
        first = _rows(drawn, chosen.batch)
        numbers.values |= _named("first predictions", model.predict_on_batch(first[0]), 10 * VALUE)
        for start in range(0, chosen.rows, chosen.batch):
            losses = model.train_on_batch(*_rows(drawn, chosen.batch, start), return_dict=True)
            numbers.values |= _named(f"training at row {start}", losses, 10 * VALUE)
        after = weights_by_place(model)
        numbers.updates = {path: after[path] - before[path] for path in after}
        # one batch: Keras weighs a smaller last batch of several outputs otherwise on its engines
        logs = model.evaluate(
            drawn.x, drawn.y, chosen.rows, sample_weight=drawn.sample_weight, verbose=0, return_dict=True
        )
        numbers.values |= _named("evaluation", logs, AFTER)
        predicted = model.predict(drawn.x, batch_size=chosen.batch, verbose=0)
        numbers.values |= _named("predictions", predicted, AFTER)
    # after the scope the model remembers it
    with contextlib.nullcontext() if then.outside else scope.scope() if scope else one_device():
        numbers.values |= _around(beside, model, drawn, distributed)
        seen = further.run(then, model, drawn, chosen.batch, together=distributed)
        for place, value in enumerate(keras.tree.flatten(seen)):
            numbers.values |= _named(f"trained on {place}", value, AFTER)
        if distributed:
            after, predicted = weights_by_place(model), model.predict(drawn.x, batch_size=chosen.batch, verbose=0)
            _loads(model, drawn, chosen, after, predicted)
    return numbers, drawn


def _around(
    beside: around.Around, model: keras.Model, drawn: Drawn, distributed: bool
) -> dict[str, tuple[np.ndarray, float]]:
    """What a `fit` with a callback gives, and what is done afterwards."""
    found: dict[str, tuple[np.ndarray, float]] = {}
    if beside.callback:
        rows = (drawn.x, drawn.y, drawn.sample_weight)
        is_split = distributed and any(_is_split(variable) for variable in model.variables)
        does = around.Does(beside.callback, rows, distributed, beside.alone and not is_split)
        # in order: a mask of dropout belongs to a row's place
        given = {"sample_weight": rows[2], "shuffle": False, "callbacks": [does]}
        model.fit(*rows[:2], batch_size=64, epochs=2, verbose=0, **given)
        for place, value in enumerate(keras.tree.flatten(does.seen)):
            found |= _named(f"callback {place}", value, AFTER)
    # the weights of a pipeline are on several devices, so that it cannot be called by hand
    if beside.after and not (beside.after == "gradients by inputs" and is_for_a_pipeline(drawn.seed)):
        found |= _named(beside.after, around.after(beside.after, model, drawn.x), 10 * AFTER)
    return found


def _is_split(variable: keras.Variable) -> bool:
    return any(isinstance(part, kf.sbp.Split) for part in kf.layout_of(variable).layout.nd_sbp)


@contextlib.contextmanager
def _scope(make: Make | None) -> Iterator[None]:
    with make().scope() if make else one_device():
        yield


def _loads(model: keras.Model, drawn: Drawn, chosen: Setting, weights: dict[str, np.ndarray], predicted: Any) -> None:
    """Save the weights, load them into the same model built under another layout.

    Raises:
        AssertionError: other weights, or other predictions.
    """
    with tempfile.TemporaryDirectory() as own:
        folder = backend().agree_on(dict.fromkeys(kf.env.local_ranks(), own))[0]
        path = Path(folder) / "m.weights.h5"
        model.save_weights(path)
        keras.utils.clear_session()
        with _scope(chosen.second):
            other = draw(drawn.seed, chosen.rows).model
            other.load_weights(path)
            loaded = weights_by_place(other)
            again = other.predict(drawn.x, batch_size=chosen.batch, verbose=0)
        backend().agree_on(dict.fromkeys(kf.env.local_ranks(), True))  # before the folder goes
    for path, value in weights.items():
        assert np.array_equal(value, loaded[path], equal_nan=True), f"loaded under another layout: {path} is another"
    over = _over(_named("predictions", predicted, 10 * VALUE), _named("predictions", again, 10 * VALUE))
    assert not over, f"loaded under another layout: {over}"


def _rows(drawn: Drawn, count: int, start: int = 0) -> tuple[Any, Any, Any]:
    rows = slice(start, start + count)
    return tuple(
        [part[rows] for part in whole] if isinstance(whole, list) else None if whole is None else whole[rows]
        for whole in (drawn.x, drawn.y, drawn.sample_weight)
    )  # type: ignore[return-value]


def _named(name: str, values: Any, tolerance: float) -> dict[str, tuple[np.ndarray, float]]:
    if isinstance(values, dict):
        return {f"{name} {key}": (np.asarray(value, "float64"), tolerance) for key, value in values.items()}
    parts = values if isinstance(values, list) else [values]
    return {f"{name} {place}": (np.asarray(part, "float64"), tolerance) for place, part in enumerate(parts)}


def compare(expected: Numbers, got: Numbers) -> dict[str, float]:
    """What is over its tolerance -> by which factor."""
    least = ROUNDING * max(
        (float(np.max(np.abs(update), initial=0.0)) for update in expected.updates.values()), default=0
    )
    over = _over(expected.values, got.values)
    for path, update in expected.updates.items():
        share = share_of_tolerance(update, got.updates.get(path), UPDATE, least)
        if not share <= 1:
            over[f"update {path}"] = share
    return over


def _over(expected: dict[str, tuple[np.ndarray, float]], got: dict[str, tuple[np.ndarray, float]]) -> dict[str, float]:
    shares = {
        name: share_of_tolerance(value, got.get(name, (None, 0.0))[0], tolerance, ROUNDING)
        for name, (value, tolerance) in expected.items()
    }
    return {name: share for name, share in shares.items() if not share <= 1}
