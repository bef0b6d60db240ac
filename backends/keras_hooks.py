"""Hooks into Keras itself, the same for every engine. Checked against keras 3.15 and 3.16 (nightly)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakKeyDictionary, WeakSet

import keras
import numpy as np
from keras import tree

from keras_flow.backends import (
    built_late,
    copies,
    dry_run_hooks,
    first_step,
    hub_models,
    layer_losses,
    object_hooks,
    rematerialized,
    states,
    symbolic,
)
from keras_flow.backends.active import backend
from keras_flow.backends.files import backups as backups  # declares by `object_hooks`
from keras_flow.backends.files import weights_files
from keras_flow.backends.hooking import Hook, always, declared, distribution_of_new, hook
from keras_flow.backends.object_hooks import replaces
from keras_flow.backends.reading import row_order
from keras_flow.backends.rendezvous import alone, meeting
from keras_flow.backends.row_wise import own_code
from keras_flow.current import dry_run, loops, models, pausing
from keras_flow.current.batch import rows_asked, rows_of
from keras_flow.current.creator import creating
from keras_flow.current.distribution import Distribution, active, as_under, holding
from keras_flow.current.dry_run import is_dry_run
from keras_flow.current.variable_layout import KerasLayout, keras_layout
from keras_flow.current.world import World
from keras_flow.errors import FlowError, LayoutError, warn

_ENTRIES = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
#: loop -> the kind of function that it runs, step for step
_FUNCTIONS = {"fit": "train", "evaluate": "test", "predict": "predict"}
_STRING_LAYERS = ("StringLookup", "TextVectorization", "Hashing", "CategoryEncoding")
#: models whose `jit_compile=True` was read from a file
_jit_of_a_file: WeakSet[keras.Model] = WeakSet()
#: model -> the distribution that its layouts were last checked for
_checked: WeakKeyDictionary[keras.Model, Distribution] = WeakKeyDictionary()
#: models whose weights were compared between the processes before a step of one batch, and their state after a `fit`
_begun: WeakSet[keras.Model] = WeakSet()
_compared: WeakSet[keras.Model] = WeakSet()


@hook(
    "keras.Model",
    _ENTRIES,
    "enters the distribution that the model was built under, places a model of another scope anew, raises "
    "layout problems before the first step, and leaves a usable model after an error",
    when=models.distribution_of,
)
def _entry(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Hook on `fit`, `generate`, the methods for one batch and the like: enter the distribution of the model."""
    name = original.__name__
    given = inspect.signature(original).bind_partial(model, *args, **kwargs).arguments
    if name in _ENTRIES:  # `generate` reads its data itself, strings too
        _refuse_empty(given, name)
        _refuse_strings(model, given.get("x"))
    _choose_jit_again(model)
    if is_dry_run():
        if models.is_built(model):
            _check(model, distribution)
            symbolic.require_fit(model, given.get("x"), given.get("y") if name == "fit" else None)
        raise FlowError(f"{original.__name__} was called in a dry run, where variables have no values")
    # a model remembers: its data are also split outside the scope
    scope = nullcontext() if active() is distribution else distribution.scope()
    with _with_others(distribution, model, name) as is_shared:
        if not is_shared:
            return alone.run(distribution, original, model, *args, **kwargs)
        with scope, row_order.ordering() if name == "fit" else nullcontext():
            try:
                return _entered(distribution, original, model, given, *args, **kwargs)
            except (TypeError, ValueError, RuntimeError) as error:
                # Keras names the numbers of rows itself
                if name == "fit" and not isinstance(error, FlowError) and "cardinality" not in str(error):
                    _say_of_targets(model, given, error)
                raise


def _say_of_targets(model: keras.Model, given: Mapping[str, object], error: Exception) -> None:
    """Raise an error that names the targets where the loss does not take them; an engine's own names its operation."""
    try:
        symbolic.require_fit(model, given.get("x"), given.get("y"))
    except FlowError as told:
        raise told from error
    except Exception:
        return


def _with_others(distribution: Distribution, model: keras.Model, name: str) -> AbstractContextManager[bool]:
    """Meet the other processes, and run with them; False where this one does alone what needs no other."""
    if distribution.has_one_rank or backend().world().process_count == 1:
        return nullcontext(True)
    may_leave = alone.is_possible(model, name)
    # a step of one batch does not meet: that would cost as much as a small one
    return meeting.running(f"model.{name}()", meets=may_leave or name != "train_on_batch", may_leave=may_leave)


def _entered(
    distribution: Distribution,
    original: Callable[..., object],
    model: keras.Model,
    given: dict[str, object],
    *args: object,
    **kwargs: object,
) -> object:
    name = original.__name__
    distribution.ensure_entered()
    if not model.built:
        distribution.build_for(model, given.get("x"))
    outer = loops.running()
    if distribution.adopt(model, *filter(None, [given.get("callbacks")])):
        _make_again(model, outer)
    if models.is_built(model):
        _check(model, distribution)
    if name == "fit":
        args, kwargs = distribution.verified(model, original, args, kwargs)
    with loops.within(loops.Loop(model, name, given)), first_step.watched(model) if name == "fit" else nullcontext():
        try:
            if distribution.has_one_rank and model.built:
                with _keras_alone(distribution):
                    return original(model, *args, **kwargs)
            own_steps = distribution.own_steps(model)
            if models.is_built(model) and not outer and (name in _FUNCTIONS or model not in _begun):
                _compare_copies(model, with_state=own_steps is None)
            if name == hub_models.GENERATE and not distribution.has_one_rank and backend().world().process_count > 1:
                hub_models.require_alike(distribution, given, own_steps is not None)
            if own_steps is not None:
                with own_steps, holding(None), as_under(distribution):
                    return original(model, *args, **kwargs)
            with distribution.uneven_notice.expecting(_batch_size(original, given)):
                result = original(model, *args, **kwargs)
            if name == "fit":
                _compare_state(model)
            models.laid(model)
            return result
        except BaseException as error:
            backend().recover(model)
            _make_again(model, outer)
            _raise_collected(model, distribution, error)
            raise


def _make_again(model: keras.Model, outer: Sequence[loops.Loop]) -> None:
    """Make the functions again that the loops around this call run, where they were dropped with the old layouts.

    A callback may call `evaluate` within `fit`, and validation is such a call; Keras then goes on with the function
    that it made when the outer loop began.
    """
    for loop in outer:
        if loop.model is model and loop.name in _FUNCTIONS:
            getattr(model, f"make_{_FUNCTIONS[loop.name]}_function")()


def _compare_copies(model: keras.Model, with_state: bool = True) -> None:
    """Compare the weights that a loop begins with, where each process has given its ranks their values.

    Args:
        model: the model whose loop begins.
        with_state: also compare what calls assign. A pipeline keeps it on the ranks that use it alone.
    """
    _begun.add(model)
    if backend().world().process_count > 1 and not is_dry_run():
        state = set() if with_state else {id(variable) for variable in model.non_trainable_variables}
        variables = [variable for variable in copies.variables_of(model) if id(variable) not in state]
        copies.compare(variables, backend().shards)


def _compare_state(model: keras.Model) -> None:
    """Compare what the first `fit` of a model has assigned, where processes may have computed different programs."""
    if model not in _compared and backend().world().process_count > 1:
        _compared.add(model)
        states.compare(model, backend().shards)


@contextmanager
def _keras_alone(distribution: Distribution) -> Iterator[None]:
    """One rank has nothing to share: no distribution holds while its loop runs, so that no hook is in its steps."""
    on_rank = backend().on_rank(distribution.placement.ranks[0])
    with holding(None), on_rank, as_under(distribution):
        yield


def _batch_size(original: Callable[..., object], given: dict[str, object]) -> int | None:
    """The rows of a batch of arrays, as Keras's `ArrayDataAdapter` makes it; None where the data say it themselves."""
    asked = rows_asked(given.get("batch_size"))
    if asked:  # 0 is the default, too
        return asked
    arrays, steps = tree.flatten(given.get("x")), rows_asked(given.get("steps_per_epoch") or given.get("steps"))
    if "batch_size" not in inspect.signature(original).parameters or not all(hasattr(x, "shape") for x in arrays):
        return None
    rows = rows_of(arrays)
    return -(-rows[0] // steps) if steps and rows else 32


def _check(model: keras.Model, distribution: Distribution) -> None:
    if _checked.get(model) is not distribution or distribution.has_problems:
        distribution.check(model)
        distribution.warn_of_idle_axes(model)
        _checked[model] = distribution


def _refuse_empty(given: dict[str, object], method: str) -> None:
    data, size = given.get("x"), given.get("batch_size")
    if size is not None and rows_asked(size) is None:
        raise FlowError(
            f"{method} was given batch_size={size!r}; legal is a whole number of at least 1 (rows); 0 and "
            "None stand for Keras's default"
        )
    if (data is None and given.get("y") is None) or (isinstance(data, (list, tuple, dict)) and not data):
        raise FlowError(f"{method} was given no data: x is {data!r}; give at least one row")
    for leaf in tree.flatten(data):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape) and shape[0] == 0:
            raise FlowError(f"{method} was given no data: x has shape {list(shape)}; give at least one row")


def _refuse_strings(model: keras.Model, data: object) -> None:
    """String inputs, on an engine that has no strings: Keras's own error names neither the layer nor a way out."""
    reason = backend().capabilities.refused.get("string inputs")
    shape = getattr(data, "shape", None)
    kind = getattr(getattr(data, "dtype", None), "kind", "")
    if reason is None or shape is None or kind not in tuple("OSU"):
        return
    if kind == "O" and not all(isinstance(each, str | bytes) for each in np.ravel(np.asarray(data))[:100]):
        raise FlowError(
            f"model {model.name!r} was given an array of Python objects (dtype object, shape {list(shape)}): give "
            "one of numbers, such as x.astype('float32'). Rows of different lengths are padded first "
            "(keras.utils.pad_sequences)"
        )
    takers = [layer.name for layer in model._flatten_layers() if type(layer).__name__ in _STRING_LAYERS]
    raise FlowError(
        f"model {model.name!r} was given strings (shape {list(shape)})"
        + (f" for its layers {takers}" if takers else "")
        + f": {reason}. Apply TextVectorization or StringLookup in the input pipeline (`dataset.map(layer)`, or "
        "`layer(strings)` beforehand) and train on the integers"
    )


@hook(
    "keras.Model",
    "_symbolic_build",
    "a model whose variables appear with the first batch is checked then; without it bad rules are silent",
)
def _symbolic_build(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Hook on `Trainer._symbolic_build`: check the layouts of variables that appear with the first batch."""
    was_built = models.is_built(model)
    try:
        result = original(model, *args, **kwargs)
    except Exception as error:  # Keras makes a RuntimeError of every error in a layer
        _raise_collected(model, distribution, error)
        raise
    _check(model, distribution)
    if not was_built:
        _compare_copies(model)
    return result


def _raise_collected(model: keras.Model, distribution: Distribution, error: BaseException) -> None:
    """Raise the layout problems that stand behind an error, if there are any, all together.

    Else our own error that Keras wrapped into one of its kind.
    """
    if isinstance(error, Exception) and not isinstance(error, LayoutError) and distribution.has_problems:
        try:
            distribution.check(model)
        except LayoutError as problems:
            raise problems from error
    inner = (error.__cause__ or error.__context__) if own_code.is_wrapped_by_keras(error) else None
    while inner is not None:
        if isinstance(inner, FlowError):
            raise inner from error
        inner = inner.__cause__ or inner.__context__


@hook("keras.Layer", "add_weight", "tells which layer makes a variable: kf.shard and an engine's limits are by layer")
def _add_weight(
    _: object, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object
) -> object:
    """Hook on `Layer.add_weight`: tell who makes the variable."""
    with creating("layer", layer):
        return original(layer, *args, **kwargs)


@hook("keras.Metric", "add_variable", "metric state is broadcast and never asked of the rules")
def _add_state(
    _: object, original: Callable[..., object], metric: keras.Metric, *args: object, **kwargs: object
) -> object:
    """Hook on `Metric.add_variable`: tell who makes the variable."""
    with creating("metric"):
        return original(metric, *args, **kwargs)


@hook(
    "keras.Optimizer",
    "add_variable",
    "slots that have not their variable's shape (Adafactor) are never asked of the rules; the others may be "
    "split where their variable is not (zero=)",
    when=distribution_of_new,
)
def _add_slot(
    _: object, original: Callable[..., object], optimizer: keras.Optimizer, *args: object, **kwargs: object
) -> object:
    """Hook on `Optimizer.add_variable`: a slot has the layout that goes with its variable's, which Keras hands on."""
    layout = kwargs.get("layout")
    if isinstance(layout, KerasLayout):
        kwargs["layout"] = layout.distribution.slot_layout(layout)
    with creating("optimizer"):
        return original(optimizer, *args, **kwargs)


def _active_or_dry_run(*args: object, **kwargs: object) -> Distribution | World | None:
    return active() or dry_run.world()


@hook(
    "keras:variables",
    "register_uninitialized_variable",
    "a variable made while a model is built symbolically gets its value later, when its layer is not known "
    "any more: its layout is chosen now",
    when=_active_or_dry_run,
)
def _value_comes_later(
    found: Distribution | World, original: Callable[..., object], variable: keras.Variable
) -> object:
    """Hook on `register_uninitialized_variable`: choose the layout now, while the layer is known."""
    if isinstance(found, Distribution) and keras_layout(variable) is None:
        variable._layout = found.get_variable_layout(variable)
    return None if is_dry_run() else original(variable)  # what is registered gets its value at the scope's end


@hook(
    "keras.Model",
    "compile_from_config",
    'a model saved where "auto" means compiling could not be trained on an engine that does not compile',
    when=always,  # without a distribution it only notes where the setting came from
)
def _compile_from_config(
    _: object,
    original: Callable[..., None],
    model: keras.Model,
    config: dict[str, object],
    *args: object,
    **kwargs: object,
) -> None:
    """Hook on `Trainer.compile_from_config`: `jit_compile=True` in a file means "auto"."""
    if config.get("jit_compile") is True and active() is not None:
        config = {**config, "jit_compile": "auto"}
    original(model, config, *args, **kwargs)
    if config.get("jit_compile") is True:
        _jit_of_a_file.add(model)


def _choose_jit_again(model: keras.Model) -> None:
    """Choose `jit_compile` again for a model that was loaded outside of any distribution and is trained now."""
    if model in _jit_of_a_file:
        _jit_of_a_file.discard(model)
        refused = "jit_compile=True" in backend().capabilities.refused
        model.jit_compile = False if refused else model._resolve_auto_jit_compile()


@replaces(
    "keras.callbacks.CallbackList",
    ("on_train_batch_begin", "on_test_batch_begin", "on_predict_batch_begin"),
    when=pausing.gate_of,
)
def _batch_begins(
    gate: pausing.Gate, original: Callable[..., object], callbacks: object, *args: object, **kwargs: object
) -> object:
    """Hook on `CallbackList.on_*_batch_begin`: a worker of a notebook may be held or stopped before a step."""
    gate.pass_through()
    return original(callbacks, *args, **kwargs)


@hook(
    "keras:global_state",
    "clear_session",
    "clears the active distribution too; without it what follows in a scope is not distributed, in silence",
)
def _clear_session(distribution: Distribution, original: Callable[..., None], *args: object, **kwargs: object) -> None:
    """Hook on `clear_session`: an open scope holds.

    Keras keeps the active distribution with all else that the call clears, and KerasTuner makes it before each trial.
    """
    original(*args, **kwargs)
    if distribution.open_scopes:
        keras.distribution.set_distribution(distribution)
    else:
        warn(
            "keras.utils.clear_session() has cleared the distribution that keras.distribution.set_distribution() had "
            "set: models made from here on are not distributed. Set it again, or use `with distribution.scope():`, "
            "which holds"
        )


def wrap_loaded() -> None:
    """Wrap what is found by its name in the classes of models that exist."""
    hub_models.wrap_loaded(_entry)


def hooks() -> Sequence[Hook]:
    """The hooks that every engine has."""
    return (
        *hub_models.hooks(_entry),
        *declared(weights_files, dry_run_hooks, rematerialized, layer_losses, built_late, object_hooks),
        *declared(sys.modules[__name__]),
    )
