"""Every place of Keras that the TensorFlow backend wraps, and why. Checked against keras 3.15 and tensorflow 2.21."""

from __future__ import annotations

from collections.abc import Sequence

from keras_flow.backends.hooking import Hook
from keras_flow.backends.tensorflow import layers, optimizer, random, trainer, variables

_CORE = "keras.src.backend.tensorflow.core"
_OPTIMIZER = "keras.src.backend.tensorflow.optimizer"
_RANDOM = "keras.src.backend.tensorflow.random"
_TRAINER = "keras.src.backend.tensorflow.trainer"


def hooks() -> Sequence[Hook]:
    """The hooks, by the file that implements them."""
    return (*_variables(), *_trainer(), *_optimizer(), *_random(), *_layers())


def _variables() -> Sequence[Hook]:
    return (
        Hook(
            _CORE,
            "Variable._initialize_with_initializer",
            variables.initialize_with_initializer,
            "makes a DTensor variable from shards; Keras makes a whole tf.Variable on one device",
        ),
        Hook(
            _CORE,
            "Variable._initialize",
            variables.initialize,
            "the same for a variable that is made from a value",
        ),
        Hook(
            "keras.src.backend.common.variables",
            "register_uninitialized_variable",
            variables.register_uninitialized,
            "chooses the layout while the layer is known; the value of a variable of a symbolic build is made later",
        ),
        Hook(
            _CORE,
            "Variable.assign",
            variables.assign,
            "load_weights, set_weights and callbacks give numpy; assigning it to a DTensor variable raises Unimplemented",
            when=variables.assigns_on_host,
        ),
        Hook(
            _CORE,
            "Variable.numpy",
            variables.to_numpy,
            "the numpy value of a split DTensor raises",
            when=variables.lies_on_mesh,
        ),
        Hook(
            _CORE,
            "Variable.__array__",
            variables.to_array,
            "as Variable.numpy",
            when=variables.lies_on_mesh,
        ),
        Hook(
            _CORE,
            "convert_to_numpy",
            variables.to_numpy,
            "as Variable.numpy; Keras imports the function by value",
            when=variables.lies_on_mesh,
            also=("keras.src.backend:convert_to_numpy", "keras.src.backend.tensorflow:convert_to_numpy"),
        ),
    )


def _trainer() -> Sequence[Hook]:
    return (
        Hook(
            _TRAINER,
            "TensorFlowTrainer._make_function",
            trainer.make_function,
            "Keras reads batches inside the compiled function, where DTensors cannot come from; here each batch is laid "
            "on the mesh before the step",
        ),
        Hook(
            _TRAINER,
            "TensorFlowTrainer.make_predict_function",
            trainer.make_predict_function,
            "as _make_function",
        ),
        Hook(
            "keras.src.trainers.trainer",
            "Trainer.compile",
            trainer.compile,
            "notes an explicit jit_compile=True, which Keras stores as it stores 'auto'; changes nothing",
            when=trainer.always,
        ),
        Hook(
            _CORE,
            "remat",
            trainer.refuse_remat,
            "TensorFlow's recompute_grad fails with Keras variables, with an error that does not name the layer",
        ),
    )


def _optimizer() -> Sequence[Hook]:
    return (
        Hook(
            _OPTIMIZER,
            "TFOptimizer.add_variable_from_reference",
            optimizer.add_variable_from_reference,
            "slots get their variable's layout; Keras's TensorFlow version colocates, which fails with DTensor variables",
            when=optimizer.on_dtensor,
        ),
        Hook(
            _OPTIMIZER,
            "TFOptimizer._backend_update_step",
            optimizer.backend_update_step,
            "avoids the merge call of tf.distribute, which does not know DTensor variables",
            when=optimizer.on_dtensor,
        ),
        Hook(
            _OPTIMIZER,
            "TFOptimizer.assign_add",
            optimizer.assign_add,
            "makes sparse gradients dense; DTensor cannot scatter into a split table",
            when=optimizer.updates_dtensor,
        ),
        Hook(
            _OPTIMIZER,
            "TFOptimizer.assign_sub",
            optimizer.assign_sub,
            "as assign_add",
            when=optimizer.updates_dtensor,
        ),
    )


def _random() -> Sequence[Hook]:
    why = "under DTensor a draw depends on how its result is split; here every rank draws the whole"
    record = "; a new variable asks which draw an initializer makes, and makes each rank's part of it alone"
    recorded = (random.normal, random.truncated_normal, random.uniform)
    whole = ("randint", "categorical", "gamma", "beta", "binomial")
    return (
        *(
            Hook(_RANDOM, function.__name__, function, why + record, when=random.draws_or_records)
            for function in recorded
        ),
        *(Hook(_RANDOM, name, random.draw, why, when=random.draws_in_step) for name in whole),
        Hook(_RANDOM, "dropout", random.dropout, why, when=random.draws_in_step),
        Hook(_RANDOM, "shuffle", random.shuffle, why, when=random.draws_in_step),
        Hook(
            _RANDOM,
            "_cast_seed",
            random.cast_seed,
            "a draw on the host by a generator whose state lies on the mesh; mixing both raises",
            when=random.seed_is_on_mesh,
        ),
    )


def _layers() -> Sequence[Hook]:
    return (
        Hook(
            "keras.src.layers.layer",
            "Layer.__call__",
            layers.call,
            "model(x) outside of a step: plain tensors do not mix with DTensor variables",
            when=layers.is_outer_call,
        ),
        Hook(
            "keras.src.metrics.metrics_utils",
            "confusion_matrix",
            layers.confusion_matrix,
            "MeanIoU scatters, which DTensor cannot (ScatterNd: expected type int64 != int32)",
            when=optimizer.on_dtensor,
            also=("keras.src.metrics.iou_metrics:confusion_matrix",),
        ),
    )
