"""Every place of Keras that keras_flow wraps on TensorFlow. Checked: keras 3.15, 3.16 (nightly), TF 2.21."""

from __future__ import annotations

from keras_flow.backends import logical_random, reading_sources, shared_files
from keras_flow.backends.hooking import Hook, always, applied_distribution
from keras_flow.backends.tensorflow import (
    convolutions,
    host_calls,
    layers,
    mirrored_step,
    mirrored_strategy,
    operation_hooks,
    operations,
    optimizer,
    random,
    reading,
    rematerialized,
    replica_math,
    trainer,
    variables,
    windows,
)
from keras_flow.current import dry_run

_RANDOM = "keras:random"


def hooks() -> tuple[Hook, ...]:
    """The hooks of this engine; those common to all are in `keras_flow.backends.keras_hooks`."""
    return (
        *(*_variables(), *_trainer(), *_layers(), *_optimizer(), *_random()),
        *operation_hooks.hooks(),
        *_replicas(),
        *shared_files.hooks(),
        # last, so that these are asked before the hooks above on the same functions
        *logical_random.hooks(_RANDOM),
    )


def _variables() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Variable",
            "_initialize_with_initializer",
            variables.initialize_with_initializer,
            "makes a DTensor variable from shards; Keras makes a whole tf.Variable on one device",
        ),
        Hook(
            "keras.Variable",
            "_initialize",
            variables.initialize,
            "the same for a variable that is made from a value",
        ),
        Hook(
            "keras.Variable",
            "assign",
            variables.assign,
            "load_weights, set_weights and callbacks give numpy, which a DTensor variable refuses (Unimplemented)",
            when=variables.assigned_on_host,
        ),
        Hook(
            "keras.Variable",
            "__tf_tensor__",
            variables.to_tensor,
            "a weight split over an axis of the batch is gathered where it is used; DTensor fails on some uses",
            when=variables.layout_of_use,
        ),
        Hook(
            "keras.Variable",
            "_direct_assign",
            variables.direct_assign,
            "the same variables are updated in their own layout",
            when=variables.layout_in_step,
        ),
        Hook(
            "keras:core",
            "convert_to_tensor",
            variables.convert,
            "variables are left to TensorFlow's compiled code, which reads DTensors where plain tensors are meant",
            when=variables.read_directly,
        ),
        Hook(
            "keras.Variable",
            "numpy",
            variables.to_numpy,
            "the numpy value of a split DTensor raises",
            when=variables.value_on_mesh,
        ),
        Hook(
            "keras.Variable",
            "__array__",
            variables.to_array,
            "as Variable.numpy",
            when=variables.value_on_mesh,
        ),
        Hook(
            "keras:core",
            "convert_to_numpy",
            variables.to_numpy,
            "as Variable.numpy; Keras imports the function by value",
            when=variables.value_on_mesh,
        ),
        *(
            Hook(
                place,
                name,
                variables.copied,
                "while process 0 writes files alone, what is in several processes was read before",
                when=variables.copy_while_writing,
            )
            for place, name in (
                ("keras.Variable", "numpy"),
                ("keras.Variable", "__array__"),
                ("keras:core", "convert_to_numpy"),
            )
        ),
    )


def _trainer() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Model",
            "_make_function",
            trainer.make_function,
            "Keras reads batches inside the compiled function, which cannot yield DTensors; a batch is put "
            "on the mesh before the step",
            when=trainer.functions_by_dtensor,
        ),
        Hook(
            "keras.Model",
            "_make_function",
            host_calls.with_own_errors,
            "an error of a collective in a step (keras_flow.hvd) would be 60 lines of TensorFlow's around its text",
            when=host_calls.steps_that_call,
        ),
        Hook(
            "keras.Model",
            "make_predict_function",
            trainer.make_predict_function,
            "as _make_function",
            when=trainer.functions_by_dtensor,
        ),
        *reading_sources.hooks(reading.READER),
        Hook(
            "keras.Model",
            "compile",
            trainer.compile,
            "notes an explicit jit_compile=True, which Keras stores as it stores 'auto'; XLA cannot wait for others",
            when=always,
        ),
        Hook(
            "keras:core",
            "remat",
            rematerialized.remat,
            "TensorFlow's recompute_grad fails with Keras variables, with an error that does not name the layer",
            when=applied_distribution,
        ),
    )


def _layers() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Layer",
            "__call__",
            layers.call,
            "model(x) outside of a step: one rank computes it, with whole variables; DTensor fails on many operations "
            "when it sees one at a time",
            when=layers.distribution_outside,
        ),
        *(
            Hook(
                "keras:nn",
                name,
                function,
                "DTensor's convolutions and pools hold tensors split by rows only; weights nearby split them. It has "
                "no dilated ones, none in groups on CPUs without oneDNN, and no gradient of depthwise ones and of "
                "average pools",
                when=convolutions.distribution_of_step,
            )
            for name, function in (
                ("conv", convolutions.convolve),
                ("conv_transpose", convolutions.convolve_transposed),
                ("depthwise_conv", windows.depthwise),
                ("separable_conv", windows.separable),
                ("max_pool", convolutions.max_pool),
                ("average_pool", windows.average_pool),
            )
        ),
        Hook(
            "keras:nn",
            "conv",
            convolutions.convolve_directly,
            "groups are convolved in a tf.function of Keras's own, which would read the kernel inside",
            when=convolutions.read_kernel,
        ),
        Hook(
            "keras:metrics_utils",
            "confusion_matrix",
            layers.confusion_matrix,
            "MeanIoU scatters, which DTensor cannot (ScatterNd: expected type int64 != int32)",
            when=optimizer.distribution_by_dtensor,
        ),
        Hook(
            "keras:tf_utils",
            "dense_bincount",
            layers.dense_bincount,
            "CategoryEncoding and IntegerLookup count by DenseBincount, whose result has no shape on a mesh",
            when=operations.in_traced_step,
        ),
        Hook(
            "keras.layers.BatchNormalization",
            "call",
            layers.batch_normalization,
            "batch_statistics='replica': statistics by data rank, on DTensor too",
            when=layers.wants_replica_statistics,
        ),
    )


def _optimizer() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Optimizer",
            "_var_key",
            optimizer.described_key,
            "explain of a model that is only described: the key of a variable would be read off its value",
            when=dry_run.world,
        ),
        Hook(
            "keras.Optimizer",
            "add_variable_from_reference",
            optimizer.add_variable_from_reference,
            "slots get their variable's layout; Keras's TensorFlow version colocates, which DTensor cannot",
        ),
        Hook(
            "keras.Optimizer",
            "apply",
            optimizer.apply,
            "gives gradients their variables' layouts; DTensor fails where it guesses others (EmitAllScatter)",
            when=optimizer.distribution_of_update,
        ),
        Hook(
            "keras.Optimizer",
            "_backend_update_step",
            optimizer.backend_update_step,
            "avoids the merge call of tf.distribute, which does not know DTensor variables",
            when=optimizer.distribution_by_dtensor,
        ),
        Hook(
            "keras.Optimizer",
            "assign",
            optimizer.assign,
            "as assign_add",
            when=optimizer.updated_variable,
        ),
        Hook(
            "keras.Optimizer",
            "assign_add",
            optimizer.assign_add,
            "makes sparse gradients dense; DTensor cannot scatter into a split table",
            when=optimizer.updated_variable,
        ),
        Hook(
            "keras.Optimizer",
            "assign_sub",
            optimizer.assign_sub,
            "as assign_add",
            when=optimizer.updated_variable,
        ),
    )


def _random() -> tuple[Hook, ...]:
    why = "under DTensor a draw depends on how its result is split; here every rank draws the whole"
    draws = ("normal", "truncated_normal", "uniform", "randint", "categorical", "gamma", "beta", "binomial")
    return (
        *(Hook(_RANDOM, name, random.draw, why, when=random.distribution_of_draw) for name in draws),
        Hook(_RANDOM, "dropout", random.dropout, why, when=random.distribution_of_draw),
        Hook(_RANDOM, "shuffle", random.shuffle, why, when=random.distribution_of_draw),
        Hook(
            _RANDOM,
            "_cast_seed",
            random.cast_seed,
            "a draw on the host by a generator whose state is on the mesh; mixing both raises",
            when=random.seed_on_mesh,
        ),
    )


def _replicas() -> tuple[Hook, ...]:
    """Those of `kf.DataParallel(strategy="mirrored")`."""
    loss = "keras:losses"
    draws = ("normal", "uniform", "truncated_normal", "randint")
    return (
        Hook(
            "tensorflow.python.distribute.distribute_lib",
            "StrategyBase.scope",
            mirrored_strategy.refuse_strategy,
            "a strategy of the user's inside a distribution's scope: its variables and steps would wait for ever",
            when=mirrored_strategy.foreign_strategy,
        ),
        Hook(
            "keras.Model",
            "_make_function",
            mirrored_step.make_function,
            "rows are cut by the balanced split, metrics are read across replicas (Keras: the mean of results)",
            when=mirrored_step.functions_by_strategy,
        ),
        Hook(
            "keras.Model",
            "make_predict_function",
            mirrored_step.make_predict_function,
            "as _make_function; results are joined in the order of rows",
            when=mirrored_step.functions_by_strategy,
        ),
        Hook(
            "keras:numpy",
            "add",
            replica_math.add,
            "Keras takes a tensor [0, n] for a bias of length n",
            when=replica_math.without_rows,
        ),
        *(
            Hook(
                "keras:nn",
                name,
                replica_math.convolve,
                "a convolution of no rows has the channels of its input",
                when=replica_math.without_rows,
            )
            for name in ("conv", "conv_transpose", "depthwise_conv", "separable_conv")
        ),
        Hook(
            loss,
            "reduce_values",
            replica_math.reduce_values,
            "Keras takes the mean of replica means, which is wrong where their counts differ",
            when=replica_math.rows,
        ),
        Hook(
            loss,
            "apply_mask",
            replica_math.apply_mask,
            "Keras weights masked rows by the counts of one replica",
            when=replica_math.rows,
        ),
        Hook(
            loss,
            "scale_loss_for_distribution",
            replica_math.scale_loss,
            "added losses count by rows, not by replicas",
            when=replica_math.rows,
        ),
        Hook(
            loss,
            "unscale_loss_for_distribution",
            replica_math.unscale_loss,
            "trackers see the logical loss, not the local one times the number of replicas",
            when=replica_math.rows,
        ),
        *(
            Hook(
                place,
                "apply",
                replica_math.apply,
                "Keras clips and accumulates a replica's gradient before the sum",
                when=replica_math.rows,
            )
            for place in ("keras.Optimizer", "keras.optimizers.LossScaleOptimizer")
        ),
        Hook(
            "keras.Optimizer",
            "_all_reduce_sum_gradients",
            replica_math.keep_gradients,
            "gradients are summed once, by `apply`",
            when=replica_math.rows,
        ),
        Hook(
            _RANDOM,
            "dropout",
            replica_math.dropout,
            "Keras draws the same mask on every replica",
            when=replica_math.rows,
        ),
        *(Hook(_RANDOM, name, replica_math.draw, "as dropout", when=replica_math.rows) for name in draws),
        *(
            Hook(_RANDOM, name, replica_math.refuse_draw, "MixUp mixes rows of one replica", when=replica_math.rows)
            for name in ("gamma", "beta", "binomial", "categorical", "shuffle")
        ),
        Hook(
            "keras:image",
            "elastic_transform",
            replica_math.refuse_draw,
            "draws without Keras's random functions: the same on every replica",
            when=replica_math.rows,
        ),
        Hook(
            "keras.layers.BatchNormalization",
            "_moments",
            layers.moments,
            "Keras takes each replica's statistics, or with synchronized=True those without the mask",
            when=layers.rows_of_global,
        ),
    )
