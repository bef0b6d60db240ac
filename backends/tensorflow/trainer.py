"""Keras's trainer on TensorFlow: one compiled step for each shape of batch, on the mesh of the distribution."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from weakref import WeakSet, ref

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_flow.backends import random_states
from keras_flow.backends.hooking import always, hook
from keras_flow.backends.reading import batch_watch
from keras_flow.backends.reading.batch_watch import BatchWatch
from keras_flow.backends.tensorflow import profiled_programs, unpartitioned
from keras_flow.backends.tensorflow.capabilities import capabilities
from keras_flow.backends.tensorflow.data import MeshBatch, gathered, put_batch
from keras_flow.backends.tensorflow.layouts import on_mesh, view_of
from keras_flow.backends.tensorflow.mesh_values import to_logical
from keras_flow.backends.tensorflow.mirrored import strategy
from keras_flow.backends.tensorflow.operators.graph_operations import whole_operations
from keras_flow.backends.tensorflow.recovery import root_cause
from keras_flow.backends.tensorflow.traced_step import Trace, WholeOperations, compiled, tracing
from keras_flow.backends.tensorflow.whole_step import WholeStep
from keras_flow.current import loops
from keras_flow.current.distribution import Distribution
from keras_flow.current.keras_places import Trainer, compute_output_spec
from keras_flow.current.models import calls_in_step, distribution_of_functions, has_own, is_built
from keras_flow.errors import FlowError

#: models whose `compile` was told `jit_compile=True`, in so many words
_asked_for_jit: WeakSet[keras.Model] = WeakSet()
#: models whose forward pass DTensor cannot partition: none of their steps is tried
_forward_on_one_device: WeakSet[keras.Model] = WeakSet()
#: so many numbers of rows keep their traces; a draw must know its rows, so that none takes all
MOST_TRACES = 8


class LoopSource:
    """The iterator that a loop takes its batches from, which is not kept alive.

    An iterator of tf.data has threads. A model is a cycle: held by one, they would live until the garbage collector
    runs, which ends them one after the other, six for each model.
    """

    def __init__(self) -> None:
        self._last: Callable[[], object] = lambda: None

    def begins(self, source: object) -> bool:
        """Return whether a batch from this iterator is the first of its loop."""
        if self._last() is source:
            return False
        try:
            self._last = ref(source)
        except TypeError:  # a list's iterator, which has no threads
            self._last = lambda: source
        return True


class Steps:
    """A step method of a model, compiled for each number of rows, and run on the mesh.

    Args:
        model: the model.
        step: `train_step`, `test_step` or `predict_step`.
        distribution: where it runs.
    """

    def __init__(self, model: keras.Model, step: Callable, distribution: Distribution):
        self.model = model
        self.step = step
        self.distribution = distribution
        self._functions: dict[object, Callable] = {}
        self._source = LoopSource()
        self._watch = BatchWatch()
        self._ran: set[Callable] = set()
        self._whole = WholeOperations()
        self._trace = Trace()
        self._on_one_device = WholeStep(model, step, distribution) if model in _forward_on_one_device else None

    def __call__(self, data: object, source: object = None) -> object:
        """Run one step on host data; the results are logical tensors.

        Args:
            data: a batch of host values or plain tensors.
            source: the iterator that it came from, or the loop; its first batch decides whether the batch size divides.
        """
        # variables are made eagerly: inside a trace they would be tensors of a graph that is dropped
        if self.step == self.model.predict_step:
            build_for_prediction(self.model, data)
        else:
            build(self.model, data)
        if self.model.run_eagerly and self._on_one_device is None:
            self._leave_mesh_for_variables()
        # a new epoch, or other data: its first batch has the batch size, later ones may be the rest
        is_first = source is not None and self._source.begins(source)
        of_single_batches = batch_watch.of_single_batches()
        if is_first and of_single_batches is None:
            self._watch.restart(getattr(source, "batches", None))
        if source is not None:
            (of_single_batches or self._watch).see(data)
        # given up for this model before: no new try for each batch
        if self._on_one_device is not None:
            return self._on_one_device(gathered(data, self.distribution))
        batch = put_batch(data, self.distribution, self.model)
        # a prediction of a few rows is no choice of a batch size
        if is_first and batch.rows is not None and self.step != self.model.predict_step:
            self.distribution.uneven_notice.see(batch.rows, self.distribution.num_model_replicas)
        return self._run(batch, data)

    def _leave_mesh_for_variables(self) -> None:
        """Let one device run the eager steps of a model with variables of TensorFlow's own.

        A compiled step is given up where its trace changes one. An eager operation that does is run by each rank.
        """
        variable = unpartitioned.variable_of_tensorflow(self.model)
        if variable is not None:
            unpartitioned.say_eager_steps_run_on_one_device(self.model, variable, self.distribution.strict)
            self._on_one_device = WholeStep(self.model, self.step, self.distribution, compile=False)

    def _run(self, batch: MeshBatch, data: object) -> object:
        # one program for each number of rows: DTensor needs static shapes
        function = self._function(batch)
        failed: Exception | None = None
        try:
            with on_mesh(view_of(self.distribution).mesh):
                outputs = function(batch.data)
            outputs = tree.map_structure(to_logical, outputs)
        except tf.errors.OpError as error:
            if not unpartitioned.is_of_partitioning(error):
                raise root_cause(error, self.model) from None
            failed = error
        except Exception as error:
            # not of partitioning: the user's own error
            if self._trace.given_up is None:
                raise
            failed = error
        # below the handlers, so that an error of the program itself, on one device, has no other behind it
        if failed is None:
            if function not in self._ran:
                # said after the first run: before it, DTensor may still ask for more operations to be whole
                self._ran.add(function)
                unpartitioned.say_what_is_whole(self.model, self._trace, self._whole)
            return outputs
        # nothing of a compiled step has run yet, so it can be tried again; traced again, because DTensor ends the
        # process when it meets a function that it has failed on (TensorFlow 2.21)
        of_dtensor = failed if isinstance(failed, tf.errors.OpError) and not self.model.run_eagerly else None
        if of_dtensor is not None and unpartitioned.allow_whole(of_dtensor, self._whole):
            self._functions.clear()
            return self._run(batch, data)
        return self._run_on_one_device(data, failed)

    def _run_on_one_device(self, data: object, error: Exception) -> object:
        if self.model.run_eagerly or self.distribution.strict:  # an eager step may have run in part
            raise unpartitioned.refusal(self.model, self._trace, error) from error
        unpartitioned.say_runs_on_one_device(self.model, self._trace, error)
        # a train step may fail in its gradient alone, then evaluate and predict stay on the mesh
        if self.step != self.model.train_step:
            # the forward pass is in every step, so that the others would fail as well
            _forward_on_one_device.add(self.model)
        self._on_one_device = WholeStep(self.model, self.step, self.distribution)
        return self._on_one_device(gathered(data, self.distribution))

    def _traced(self, divides: bool, rows: int | None, data: object) -> object:
        with whole_operations(self._whole), tracing(divides, rows) as self._trace:
            return self.step(data)

    def _function(self, batch: MeshBatch) -> Callable:
        if self.model.run_eagerly:
            return self.step
        key = (batch.rows, batch.divides)
        if key not in self._functions:
            if len(self._functions) == MOST_TRACES:
                oldest = self._functions.pop(next(iter(self._functions)))
                self._ran.discard(oldest)
            # no jit_compile: DTensor makes and compiles the program of each rank itself
            self._functions[key] = compiled(functools.partial(self._traced, batch.divides, batch.rows))
        return self._functions[key]


def functions_by_dtensor(model: keras.Model, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hooks that make a model's functions: its distribution, where that works by DTensor."""
    distribution = distribution_of_functions(model)
    return distribution if distribution is not None and strategy.works_by_dtensor(distribution) else None


@hook(
    "keras.Model",
    "_make_function",
    "Keras reads batches inside the compiled function, which cannot yield DTensors; a batch is put on the "
    "mesh before the step",
    when=functions_by_dtensor,
)
def make_function(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, step: Callable
) -> Callable:
    """Hook on `TensorFlowTrainer._make_function`: the function of loops, which runs `steps_per_execution` steps."""
    refuse_jit(model)
    if step == model.train_step:
        _refuse_saved_models(model)
    profiled_programs.remember(model)
    return in_turn(model, Steps(model, step, distribution))


def in_turn(model: keras.Model, steps: Callable[..., object]) -> Callable[[Iterator], object]:
    """Return a function that takes batches from an iterator and runs `steps_per_execution` steps; the last outputs."""

    def function(iterator: Iterator) -> object:
        outputs = None
        for number in range(model.steps_per_execution):
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                # the last round of steps_per_execution may be short; no step at all ends the epoch
                if number == 0:
                    raise StopIteration from None
                break
            outputs = steps(data, iterator)
        return outputs

    return function


@hook(
    "keras.Model",
    "make_predict_function",
    "batches are put on the mesh before the step, and outputs read from it after",
    when=functions_by_dtensor,
)
def make_predict_function(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, force: bool = False
) -> None:
    """Hook on `TensorFlowTrainer.make_predict_function`: a list of batches to their joined outputs."""
    if model.predict_function is not None and not force:
        return
    refuse_jit(model)
    # one for each loop, which holds its compiled programs
    model.predict_function = predicted(Steps(model, model.predict_step, distribution))


def predicted(steps: Callable[..., object]) -> Callable[[list], object]:
    """Return a function that runs a step on each of some batches, and joins their outputs."""

    def function(batches: list) -> object:
        # Keras hands over batches without their iterator; each loop is another source
        source = next(iter(loops.running()[-1:]), None)
        outputs = [steps(data, source) for data in batches]
        return outputs[0] if len(outputs) == 1 else tree.map_structure(_joined, *outputs)

    return function


def _joined(*parts: tf.Tensor) -> tf.Tensor:
    # a prediction may be one number for a batch, which has no rows to join
    return tf.stack(parts) if parts[0].shape.rank == 0 else tf.concat(parts, 0)


def build(model: keras.Model, data: object) -> None:
    """Make all variables before the step is traced, and have the layouts checked.

    A model with its own `train_step` may have no `call` to build by; its variables are then made as the step is traced.
    So are its optimizer's: only the step knows which variables it gives to the optimizer.
    """
    optimizer = getattr(model, "optimizer", None)
    own_step = has_own(model, "train_step")
    if is_built(model) and (optimizer is None or optimizer.built or own_step) and _compiled_parts_are_built(model):
        return
    # KerasTensors instead of values: nothing is computed to learn the shapes
    shapes = tree.map_structure(_spec, data)
    try:
        with _left_unbuilt(optimizer) if own_step else contextlib.nullcontext():
            model._symbolic_build(data_batch=shapes)
    except FlowError:
        raise
    except Exception:
        # the variables of a model with its own step are made as the step is traced
        if not own_step:
            raise


@contextlib.contextmanager
def _left_unbuilt(optimizer: keras.Optimizer | None) -> Iterator[None]:
    """Keras, which builds an optimizer with its model, leaves this one as it is."""
    if optimizer is None or optimizer.built:
        yield
        return
    optimizer.built = True
    try:
        yield
    finally:
        optimizer.built = False


def build_for_prediction(model: keras.Model, data: object) -> None:
    """Make the model's variables before the step is traced; losses and metrics have nothing to be built from."""
    if not is_built(model):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(tree.map_structure(_spec, data))
        compute_output_spec(model, x, training=False)


def _compiled_parts_are_built(model: keras.Model) -> bool:
    parts = (getattr(model, "_compile_metrics", None), getattr(model, "_compile_loss", None))
    return all(part is None or part.built for part in parts)


def _spec(value: tf.Tensor | np.ndarray | None) -> keras.KerasTensor | None:
    if value is None or isinstance(value, tf.experimental.Optional):
        return None
    if not hasattr(value, "dtype"):
        value = tf.convert_to_tensor(value)
    return keras.KerasTensor(tuple(value.shape), keras.backend.standardize_dtype(value.dtype))


# ---- jit_compile


@hook(
    "keras.Model",
    "compile",
    "notes an explicit jit_compile=True, which Keras stores as it stores 'auto'; XLA cannot wait for others",
    when=always,
)
def compile(_: object, original: Callable[..., object], model: keras.Model, *args: object, **kwargs: object) -> object:
    """Hook on `Trainer.compile`: remember an explicit `jit_compile=True`, which Keras does not tell from `"auto"`.

    A step whose optimizer waits for other processes is not compiled by XLA.
    """
    # its place in `Trainer.compile(optimizer, loss, loss_weights, metrics, weighted_metrics, run_eagerly,
    # steps_per_execution, jit_compile)`
    if kwargs.get("jit_compile") is True or (len(args) > 7 and args[7] is True):
        _asked_for_jit.add(model)
    else:
        _asked_for_jit.discard(model)
    result = original(model, *args, **kwargs)
    refuse_jit_of_calls(model)
    return result


def refuse_jit_of_calls(model: keras.Model) -> None:
    """Leave out XLA where an optimizer waits for other processes in a step; an error where it is asked for."""
    if not (calls_in_step(model) and model.jit_compile):
        return
    if model in _asked_for_jit:
        raise FlowError(
            f"model {model.name!r} is compiled with jit_compile=True, and its optimizer waits for other processes "
            "in a step, which XLA cannot do on tensorflow. Use jit_compile='auto' (it means False here)"
        )
    model.jit_compile = False


def refuse_jit(model: keras.Model) -> None:
    """An error where `compile` was told `jit_compile=True` in so many words."""
    if model in _asked_for_jit and model.jit_compile:
        raise FlowError(
            f"model {model.name!r} is compiled with jit_compile=True, which the tensorflow backend cannot do under a "
            f"distribution: {capabilities.refused['jit_compile=True']}. Use jit_compile='auto' (it means False here), "
            "or the jax backend, which compiles every step with XLA"
        )


def _refuse_saved_models(model: keras.Model) -> None:
    """The functions of a SavedModel hold its own variables: those of the layer are others, once they are laid."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.TFSMLayer) and layer.trainable_variables:
            raise FlowError(
                f"layer {layer.name!r} of model {model.name!r} computes with the variables of the SavedModel "
                f"{str(layer.filepath)!r}, which no distribution can lay over ranks, so it would not be trained. Set "
                "`trainable = False` on it before `compile` to use it as it is, or save its model with "
                "model.save('m.keras') and load that with keras.models.load_model"
            )


# ---- what the interface asks


def enter(distribution: Distribution) -> None:
    """Make the mesh, or the strategy, of a distribution, and take process 0's random states."""
    strategy.refuse_inside_strategy(distribution)
    random_states.align()
    if strategy.is_mirrored(distribution):
        strategy.strategy_of(distribution)
    else:
        view_of(distribution)


def forget_steps(model: keras.Model) -> None:
    """Drop the step functions of a model."""
    if isinstance(model, Trainer):
        model.train_function = None
        model.test_function = None
        model.predict_function = None


def recover(model: keras.Model) -> None:
    """After a step raised.

    Updates are the last operations of a step, so weights are the last good ones; steps whose trace was interrupted are
    dropped.
    """
    forget_steps(model)


def rejoin(times: int) -> bool:
    """False: DTensor keeps the error of a broken collective for all later ones."""
    return False


def double_precision() -> AbstractContextManager[object]:
    """Nothing to switch on."""
    return contextlib.nullcontext()
