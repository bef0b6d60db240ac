"""Each place of Keras and torch that keras_flow wraps on PyTorch. Checked: keras 3.15, 3.16 (nightly), torch 2.13."""

from __future__ import annotations

from keras_flow.backends import logical_random, reading_sources, shared_files
from keras_flow.backends.dry_run_hooks import leave_out
from keras_flow.backends.hooking import Hook, always, applied_distribution, layout_over_ranks
from keras_flow.backends.torch import (
    attention,
    ddp_of_keras,
    gathered_weights,
    generation,
    layers,
    log_readers,
    losses,
    metrics,
    mirrored,
    optimizer,
    partial_numbers,
    random,
    reading,
    reading_dtensors,
    relayout,
    rematerialized,
    saving,
    shapes,
    split_layers,
    step,
    trainer,
    variables,
)
from keras_flow.current import dry_run


def hooks() -> tuple[Hook, ...]:
    """The hooks of this engine; those common to all are in `keras_flow.backends.keras_hooks`."""
    # first, so that what Keras does by itself is asked last
    return (
        *ddp_of_keras.hooks(),
        *attention.hooks(),
        *_variables(),
        *_trainer(),
        *_layers(),
        *_losses(),
        *_optimizer(),
        *_random(),
        *_saving(),
        *_operations(),
    )


def _variables() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Variable",
            "_initialize_with_initializer",
            variables.initialize_with_initializer,
            "variables are created sharded; without it every rank makes the whole value",
        ),
        Hook(
            "keras.Variable",
            "_initialize",
            variables.initialize,
            "variables of the consistent view are DTensors; Keras 3.15 has no distribution on torch",
        ),
        Hook(
            "keras.Layer",
            "_track_variables",
            leave_out,
            "explain of a model that is only described: handing variables to torch's modules would make their values",
            when=dry_run.world,
        ),
        Hook(
            "keras.Variable",
            "assign",
            variables.assign,
            "a rank reads its own part of a weight from the file; Keras makes a whole tensor first",
            when=variables.assigned_from_file,
        ),
        Hook(
            "keras.Variable",
            "_direct_assign",
            variables.direct_assign,
            "copy_ needs equal placements: `mixed torch.Tensor and DTensor`",
            when=layout_over_ranks,
        ),
        Hook(
            "keras.Variable",
            "_maybe_autocast",
            gathered_weights.read,
            "zero=3: layers would meet a rank's part of a weight",
            when=gathered_weights.read_in_step,
        ),
        Hook(
            "keras.Variable",
            "__array__",
            saving.read_stage,
            "numpy(), get_weights and saving of a pipeline's weights, of which one rank has the values",
            when=saving.of_stage,
        ),
        Hook(
            "torch.distributed.tensor",
            "DTensor.__array__",
            saving.to_array,
            "numpy(), get_weights and saving of DTensors: `.numpy() is not supported for tensor subclasses`",
            when=always,  # torch itself can only raise here
        ),
        *(
            Hook(
                "torch.distributed.tensor",
                f"DTensor.{name}",
                replacement,
                "read values are the logical tensor's; DTensor raises, or shows this rank's piece",
                when=always,
            )
            for name, replacement in (
                ("numpy", reading_dtensors.to_numpy),
                ("tolist", reading_dtensors.to_list),
                ("__repr__", reading_dtensors.to_text),
                ("__format__", reading_dtensors.formatted),
            )
        ),
    )


def _trainer() -> tuple[Hook, ...]:
    return (
        *(
            Hook(
                "keras.Model",
                f"make_{name}_function",
                trainer.make_function,
                "batches become this rank's part, and logs and outputs logical again",
            )
            for name in ("train", "test", "predict")
        ),
        Hook(
            "keras:EpochIterator",
            "__init__",
            trainer.new_source,
            "the first batches of each data source are compared across ranks",
        ),
        *reading_sources.hooks(reading.READER),
        Hook(
            "torch.autograd",
            "grad",
            mirrored.autograd_grad,
            "a train_step that takes gradients this way would get those of this rank's rows",
            when=mirrored.step_on_all_rows,
        ),
        Hook(
            "torch",
            "cond",
            step.cond,
            "torch compiles both branches, and its compiler fails on DTensors: the one that is taken is run",
            when=step.step_or_active,
        ),
        Hook(
            "keras:core",
            "remat",
            rematerialized.remat,
            "the second run of a layer would compute other rows, draw other numbers, and update statistics again",
            when=applied_distribution,
        ),
    )


def _layers() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Layer",
            "__call__",
            layers.call,
            "data parallel computes own rows in it; partial sums leave it reduced; model(x) outside a step works",
            when=layers.step_or_distribution,
        ),
        Hook(
            "keras.Layer",
            "_get_regularization_losses",
            layers.regularization,
            "model.losses outside of a step: plain losses do not mix with DTensors",
            when=layers.distribution_outside,
        ),
        Hook(
            "keras:core",
            "compute_output_spec",
            shapes.infer,
            'a `call` that the device "meta" cannot run is run on plain tensors, which DTensors do not mix with',
        ),
        Hook(
            "keras.layers.BatchNormalization",
            "_moments",
            layers.moments,
            "statistics of all rows, not of this rank's",
            when=step.running_step,
        ),
        Hook(
            "keras.layers.BatchNormalization",
            "call",
            layers.batch_normalization,
            'batch_statistics="replica"',
            when=layers.wants_replica_statistics,
        ),
        *(
            Hook(
                f"keras.layers.{name}",
                "call",
                split_layers.call,
                "layers with split weights on plain tensors, without DTensor's time for each operator",
                when=split_layers.step_with_split,
            )
            # all convolutions have that of Conv2D, but for Conv1D
            for name in ("Dense", "EinsumDense", "Conv2D", "Conv1D")
        ),
        Hook(
            "keras.layers.BatchNormalization",
            "call",
            split_layers.call,
            "split channels on plain tensors, without DTensor's time for each operator",
            when=split_layers.step_with_channels,
        ),
        Hook(
            "keras.layers.MultiHeadAttention",
            "call",
            split_layers.attention,
            "split heads on plain tensors, without DTensor's time for each operator",
            when=split_layers.step_with_heads,
        ),
    )


def _losses() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Loss",
            "__call__",
            losses.call,
            "losses add up own rows; without it the outputs of all rows are gathered",
            when=losses.of_split_rows,
        ),
        Hook(
            "keras.Loss",
            "__call__",
            losses.call_on_plain,
            "losses of whole tensors without DTensor's time for each operator",
            when=losses.of_whole_tensors,
        ),
        *(
            Hook(
                "keras:losses",
                name,
                getattr(losses, name),
                "a sum over own rows is reduced; the number that divides it is that of all rows",
                when=losses.rows_of_step,
            )
            for name in ("reduce_values", "apply_mask")
        ),
        *(
            Hook(
                place,
                "update_state",
                metrics.update_one,
                "the same where a train_step of the user updates a metric",
                when=metrics.outside_of_layers,
            )
            for place in metrics.classes()
        ),
        Hook(
            "keras.metrics.Mean",
            "update_state",
            metrics.update_mean,
            "what the step adds to the mean of losses, in a fifth of the operators",
            when=metrics.step_of_number,
        ),
        Hook(
            "keras.Variable",
            "assign_add",
            partial_numbers.assign_add,
            "what a loss adds to a metric is summed over the ranks with other things, when it is read at the latest",
            when=partial_numbers.adds_part,
        ),
        Hook(
            "keras.Model",
            "get_metrics_result",
            log_readers.metrics_result,
            "where nobody reads the logs of a batch, its metrics are not summed over the ranks",
            when=log_readers.reading_later,
        ),
        *(
            Hook(
                "keras.callbacks.CallbackList",
                name,
                log_readers.announce,
                "its callbacks say who reads the logs of the step that follows",
            )
            for name in ("on_train_batch_begin", "on_test_batch_begin")
        ),
        Hook(
            "keras:compile_utils",
            "MetricsList.update_state",
            metrics.update,
            "metrics add up own rows; others use operators that DTensor has no rules for, on all rows",
            when=step.running_step,
        ),
    )


def _optimizer() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Optimizer",
            "apply",
            optimizer.apply,
            "gradients arrive as partial sums: reduced in one all-reduce, not one by one",
            when=optimizer.variables_of_dtensors,
        ),
        Hook(
            "keras:torch_parallel_optimizer",
            "TorchParallelOptimizer._backend_update_step",
            optimizer.backend_update_step,
            "updates on local tensors: DTensor dispatches each operator tensor by tensor; all at once copies the model",
            when=optimizer.updates_by_element,
        ),
    )


def _random() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras:random",
            "dropout",
            random.dropout,
            "one mask for the logical tensor; without it ranks repeat the mask of their rows",
            when=step.running_step,
        ),
        *(
            Hook(
                "keras:random",
                name,
                random.draw,
                "noise for all rows, of which a rank takes its own",
                when=step.step_by_rows,
            )
            for name in ("normal", "uniform", "truncated_normal", "randint")
        ),
        # last, so that these are asked before the hooks above on the same functions
        *logical_random.hooks("keras:random"),
    )


def _saving() -> tuple[Hook, ...]:
    return (
        *shared_files.hooks(),
        Hook(
            "keras:saving_lib",
            "H5IOStore.__setitem__",
            saving.write_entry,
            "a split variable is written block by block; Keras makes a whole array of it first",
            when=saving.asking_others,
        ),
        Hook(
            "keras.Optimizer",
            "save_own_variables",
            saving.write_optimizer,
            "the same for the optimizer's variables",
            when=saving.asking_others,
        ),
    )


def _operations() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras:core",
            "slice_update",
            generation.slice_update,
            "a cache of keys and values, made of zeros, would hold all rows and heads on every rank",
            when=generation.updated_on_mesh,
        ),
        Hook(
            "torch.distributed.tensor._redistribute",
            "redistribute_local_tensor",
            relayout.redistribute_local_tensor,
            "layouts change by keras_flow's plans; DTensor moves more bytes, and on CPU gathers to split another dim",
            also=tuple(f"torch.distributed.tensor.{name}:redistribute_local_tensor" for name in ("_dispatch", "_api")),
        ),
    )
