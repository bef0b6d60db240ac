"""Every place of Keras that keras_flow wraps on JAX. Checked against keras 3.15, 3.16 (nightly) and jax 0.10."""

from __future__ import annotations

from keras_flow.backends import logical_random, reading_sources, shared_files
from keras_flow.backends.hooking import Hook, applied_distribution, layout_over_ranks
from keras_flow.backends.jax import (
    convolutions,
    data,
    fourier,
    gathered_weights,
    host_calls,
    layers,
    optimizer,
    reading,
    rematerialized,
    trainer,
    variables,
)


def hooks() -> tuple[Hook, ...]:
    """The hooks of this engine; those common to all are in `keras_flow.backends.keras_hooks`."""
    return (
        *_variables(),
        *_trainer(),
        *_layers(),
        *_optimizer(),
        *_random(),
        *_operations(),
        *shared_files.hooks(),
    )


def _variables() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Variable",
            "_initialize_with_initializer",
            variables.initialize_with_initializer,
            "initialisers that need the whole value would make it on every device",
        ),
        Hook(
            "keras.Variable",
            "assign",
            variables.assign,
            "loaded values would pass whole through device 0",
            when=layout_over_ranks,
        ),
        Hook(
            "keras.Variable",
            "_maybe_autocast",
            variables.read_here,
            "what another distribution has laid would not meet what is laid here, in a loop of the program's own",
            when=variables.laid_by_another,
        ),
        Hook(
            "keras.Variable",
            "_maybe_autocast",
            gathered_weights.read,
            "zero=3: XLA would be free to split the products of a weight as it is held, and to gather activations",
            when=gathered_weights.read_in_step,
        ),
        Hook(
            "keras:engine.distribution",
            "distribute_tensor",
            variables.distribute_tensor,
            "several processes: each new variable would be gathered from all of them, to be compared",
            when=variables.host_value,
        ),
        Hook(
            "keras:engine.distribution",
            "distribute_tensor",
            variables.lay_anew,
            "variables made of one array would share memory, and JAX ends the process where a step overwrites it twice",
            when=variables.lies_elsewhere,
        ),
        Hook(
            "keras:AnyVariable",
            "__array__",
            variables.read_whole,
            "numpy(), get_weights and saving of variables of which other processes have parts: JAX raises",
            when=variables.of_several_processes,
        ),
        Hook(
            "keras:core",
            "convert_to_numpy",
            variables.read_whole,
            "the same for tensors: predict_on_batch, ops.convert_to_numpy",
            when=variables.of_several_processes,
        ),
    )


def _trainer() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras:engine.distribution",
            "distribute_data_input",
            data.distribute_data_input,
            "one meaning of batch_size, and batches that do not divide (Keras raises IndivisibleError)",
        ),
        Hook(
            "keras:EpochIterator",
            "_get_iterator",
            data.batches_on_mesh,
            "each batch decides for itself how it is split, and the next one is transferred while a step runs",
        ),
        *reading_sources.hooks(reading.READER),
        Hook(
            "keras:trainer",
            "jit",
            trainer.jit,
            "slices padded batches inside the step",
        ),
        Hook(
            "keras:trainer",
            "jit",
            host_calls.cut,
            "a step whose optimizer waits for other processes (keras_flow.hvd) is cut there into two programs",
            when=host_calls.steps_that_call,
        ),
        Hook(
            "keras.Model",
            "compute_loss_and_updates",
            gathered_weights.not_kept,
            "zero=3: all gathered weights would be kept until the backward pass has used them",
            when=gathered_weights.gathering_step,
        ),
        Hook(
            "keras.Model",
            "_get_jax_state",
            trainer.separate_state,
            "JAX ends the process where a step is given a buffer twice, as after a fit with EMA",
        ),
        Hook(
            "keras.Model",
            "_purge_model_variables",
            trainer.purge_model_variables,
            "keeps hold of the weights while a loop runs; without it an error in evaluate or predict loses them",
        ),
        Hook(
            "keras.Model",
            "make_predict_function",
            trainer.make_predict_function,
            "several processes: the rows of an eager step's outputs are on all of them; JAX raises as they are read",
        ),
        Hook(
            "keras.Model",
            "predict_on_batch",
            trainer.predict_on_batch,
            "the batch would be computed whole on every device",
        ),
    )


def _layers() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras:core",
            "remat",
            rematerialized.remat,
            "jax.checkpoint fails where a layer draws, keeps statistics, or is told training=True",
            when=applied_distribution,
        ),
        *(
            Hook(
                "keras:nn",
                name,
                convolutions.convolve,
                "XLA counts the gradient of a kernel with groups once for each rank that has the same rows",
                when=convolutions.distribution_of_step,
            )
            for name in ("conv", "depthwise_conv")
        ),
        *(
            Hook(
                "keras:nn",
                name,
                convolutions.pool,
                "XLA has wrong gradients of windows that overlap, on positions that are split",
                when=convolutions.distribution_of_step,
            )
            for name in ("max_pool", "average_pool", "adaptive_max_pool", "adaptive_average_pool")
        ),
        Hook(
            "keras:nn",
            "conv_transpose",
            convolutions.convolve_transposed,
            "XLA convolves windows that are split with the wrong slices",
            when=convolutions.distribution_of_step,
        ),
        Hook(
            "keras.layers.BatchNormalization",
            "call",
            layers.batch_normalization,
            'batch_statistics="replica"',
            when=layers.wants_replica_statistics,
        ),
    )


def _optimizer() -> tuple[Hook, ...]:
    return (
        Hook(
            "keras.Optimizer",
            "apply",
            optimizer.apply,
            "zero=: XLA would be free to compute an update on every rank, from gathered slots",
            when=optimizer.splits_further,
        ),
    )


def _random() -> tuple[Hook, ...]:
    return logical_random.hooks("keras:random")


def _operations() -> tuple[Hook, ...]:
    return (
        *(
            Hook(
                "keras:math",
                name,
                fourier.along(*dims),
                "XLA has wrong windows for rows left over",
                when=fourier.distribution_of_windows,
            )
            for name, dims in fourier.WINDOWS.items()
        ),
        Hook(
            "keras:core",
            "associative_scan",
            fourier.associative_scan,
            "XLA pads even and odd elements wrongly where ranks do not ascend along the mesh",
            when=fourier.distribution_of_scan,
        ),
        Hook(
            "jax._src.lax.fft",  # all of jax.numpy.fft and jax.scipy.signal call it by this module, not as jax.lax.fft
            "fft",
            fourier.transform,
            "XLA's FFT on CPUs fails on an operand of another order in memory, which partitioning may give it",
            when=fourier.distribution_of_transform,
            also=("jax.lax:fft",),
        ),
    )
