"""Steps on JAX: stock jitted steps, with uneven batches sliced inside and lost weights given back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax
from keras import tree
from packaging.version import Version

from keras_flow.backends import random_states
from keras_flow.backends.hooking import hook
from keras_flow.backends.jax import data, devices, layer_scopes, layouts, partitioning, variables
from keras_flow.backends.reading import batch_watch
from keras_flow.current.loops import Loop, running
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution

#: whether outputs whose rows do not divide have no sharding that JAX knows
_MAY_NOT_NAME_SPLITS = Version(jax.__version__) < Version("0.10")

#: running loop -> the values that Keras took off the model's variables when it began; they go with the loop
_purged: WeakKeyDictionary[Loop, list[tuple[keras.Variable, jax.Array]]] = WeakKeyDictionary()


def enter(distribution: Distribution) -> None:
    """Build the mesh and take process 0's random states.

    Random layers are equal for every layout only with partitionable threefry.
    """
    layouts.mesh(distribution.placement)
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise FlowError(
            "jax_threefry_partitionable is off: random layers would depend on the layout. Leave it on (JAX's default), "
            'jax.config.update("jax_threefry_partitionable", True)'
        )
    random_states.align()


@hook("keras:trainer", "jit", "slices padded batches inside the step")
def jit(
    distribution: Distribution,
    original: Callable[..., object],
    function: Callable[..., object],
    out_shardings: object = None,
    **options: object,
) -> Callable[..., object]:
    """Hook on `jit`: partition the step where XLA's own partitioning is right.

    Await each step where the client has too few threads. Of several processes each gets the whole outputs. So does one
    process with JAX before 0.10: there XLA splits 6 rows in two over four ranks, and JAX has no sharding to say that
    ("IndivisibleError: shape=[2, 1, 2] is incompatible with mesh_shape").
    """
    # logs or predictions, and the new state
    are_whole = jax.process_count() > 1 or _MAY_NOT_NAME_SPLITS
    if are_whole and isinstance(out_shardings, tuple) and out_shardings[0] is None:
        out_shardings = (layouts.on_every_rank(distribution.placement), *out_shardings[1:])

    def step(*args: object) -> object:
        with layer_scopes.named():
            return partitioning.partitioned(function, args)

    compiled: Callable[..., object] = original(step, out_shardings=out_shardings, **options)  # type: ignore[assignment]
    # with as many threads as ranks, steps may run ahead
    if not devices.must_await_steps():
        return compiled

    def awaited(*args: object) -> object:
        return jax.block_until_ready(compiled(*args))

    return awaited


@hook(
    "keras.Model",
    "_get_jax_state",
    "JAX ends the process where a step is given a buffer twice, as after a fit with EMA; an error in evaluate or "
    "predict loses the weights, which Keras takes off the variables while a loop runs",
)
def step_state(
    _: object, original: Callable[..., tuple[list[jax.Array], ...]], model: keras.Model, **which: bool
) -> tuple[list[jax.Array], ...]:
    """Hook on `JAXTrainer._get_jax_state`: no two variables of a step's state are one array.

    Steps donate their state. JAX ends the process where several devices are given a buffer twice
    (`docs/engine-bugs.md`). A `fit` with EMA on one device leaves such a state: it assigns the averages to the
    weights, which takes no copy.

    What Keras takes off the variables is remembered for `recover`.
    """
    groups = {
        "trainable_variables": lambda: model.trainable_variables,
        "non_trainable_variables": lambda: model.non_trainable_variables,
        "optimizer_variables": lambda: model.optimizer.variables,
        "metrics_variables": lambda: model.metrics_variables,
    }
    names = [name for name in groups if which.get(name)]
    if which.get("purge_model_variables"):
        # references, no copies: a step that donates its inputs deletes them, and then the new state is used
        values = [(v, v._value) for name in names for v in groups[name]()]
        _purged.update((loop, values) for loop in running()[-1:])
    state, seen = original(model, **which), set()
    for group in state:
        for place, value in enumerate(group):
            if id(value) in seen:
                group[place] = variables.separate_copy(value, value.sharding)
            seen.add(id(value))
    if which.get("purge_model_variables"):
        # what Keras keeps of an earlier loop is older than these values, which the program may have assigned since
        kept = dict(zip(names, state, strict=True))
        model._jax_state = kept  # pyright: ignore[reportAttributeAccessIssue]
    return state


@hook("keras.Model", "_make_function", "a step that is not jitted would see the padding of a batch")
def make_function(
    _: object,
    original: Callable[..., object],
    model: keras.Model,
    step: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> object:
    """Hook on `JAXTrainer._make_function`: a step that is not jitted is given batches that do not divide as arrays."""

    def array(leaf: object) -> object:
        return leaf.__jax_array__() if isinstance(leaf, data.Uneven) else leaf

    def of_arrays(state: object, batch: object) -> object:
        return step(state, tree.map_structure(array, batch))

    is_jitted = model.jit_compile and not model.run_eagerly
    return original(model, step if is_jitted else of_arrays, *args, **kwargs)


@hook(
    "keras.Model",
    ("train_on_batch", "test_on_batch", "predict_on_batch"),
    "several processes: each may be given another batch; a batch to predict would be computed whole on every device",
)
def on_batch(
    distribution: Distribution,
    original: Callable[..., object],
    model: keras.Model,
    x: object,
    *args: Any,
    **kwargs: Any,
) -> object:
    """Hook on the methods of `JAXTrainer` for one batch: compare the batch, and split one to predict."""
    if jax.process_count() > 1:
        weights = args[1] if len(args) > 1 else kwargs.get("sample_weight")
        watch = batch_watch.of_single_batches()
        assert watch is not None  # the method runs
        watch.see((x, args[0] if args else kwargs.get("y"), weights))
    if original.__name__ == "predict_on_batch":
        x = data.put_batch(x, distribution)
    return original(model, x, *args, **kwargs)


@hook(
    "keras.Model",
    "make_predict_function",
    "several processes: the rows of an eager step's outputs are on all of them; JAX raises as they are read",
)
def make_predict_function(
    _: object, original: Callable[..., object], model: keras.Model, force: bool = False
) -> object:
    """Hook on `JAXTrainer.make_predict_function`: of several processes each gets the whole outputs of an eager step.

    Those of a jitted one are whole: see `jit`.
    """
    original(model, force)
    function: Any = model.predict_function
    is_jitted = model.jit_compile and not model.run_eagerly
    # Keras keeps a function that is made
    if is_jitted or jax.process_count() == 1 or hasattr(function, "keras_flow_whole"):
        return function

    def whole(output: object) -> object:
        return variables.gathered(output) if isinstance(output, jax.Array) else output

    def step(state: object, iterator: object) -> tuple[object, object]:
        outputs, state = function(state, iterator)
        return jax.tree.map(whole, outputs), state

    step.keras_flow_whole = True  # type: ignore[attr-defined]
    model.predict_function = step  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    return step


def forget_steps(model: keras.Model) -> None:
    """Drop jitted steps: their output shardings are those of the old layouts."""
    model.train_function = model.test_function = model.predict_function = None


def recover(model: keras.Model) -> None:
    """Give the variables their last good values after a step that raised.

    Keras takes the values off during a loop and, when a step raises in `evaluate` or `predict`, does not put them back.
    """
    # what the last finished step left is newer than what was remembered
    kept: Any = getattr(model, "_jax_state", None)
    if kept and not any(value.is_deleted() for group in kept.values() for value in group):
        model.jax_state_sync()
    for variable, value in (pair for loop in running()[-1:] for pair in _purged.pop(loop, [])):
        if variable._value is None and not value.is_deleted():
            variable._value = value


def rejoin(times: int) -> bool:
    """False: XLA's collectives are parts of compiled programs, which cannot be left."""
    return False


def double_precision() -> AbstractContextManager[object]:
    """Keep float64, of which JAX otherwise makes float32."""
    return jax.enable_x64(True)
