"""Bugs of TensorFlow's DTensor, and of TensorFlow beside it, that keras_flow goes around, each in a few lines.

Seen in tensorflow 2.21.0 (CPU). No keras_flow is needed.

    python -m tests.engine_bugs.tensorflow

runs each in a process of its own, because some end it, and prints which are still there. A function returns True while
its bug is there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

RANKS = 4
X = np.arange(32, dtype="float32").reshape(8, 4)


def _split_by_rows() -> tuple[dtensor.Mesh, tf.Tensor]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * RANKS)
    mesh = dtensor.create_mesh([("rows", RANKS)], devices=[f"CPU:{rank}" for rank in range(RANKS)])
    layout = dtensor.Layout(["rows", dtensor.UNSHARDED], mesh)
    return mesh, dtensor.pack([tf.constant(part) for part in np.split(X, RANKS)], layout)


def _fails(function: Callable[..., tf.Tensor]) -> bool:
    mesh, x = _split_by_rows()
    try:
        with dtensor.default_mesh(mesh):
            np.concatenate([part.numpy() for part in dtensor.unpack(tf.function(function)(x))])
    except Exception:
        return True
    return False


def gradient_of_top_k_scatters_all_rows_on_one_rank() -> bool:
    """The gradient of `tf.math.top_k` of rows that are split uses the indices of all rows on each rank's part.

    Instead: `top_k` has a gradient of our own for each rank's rows. Every other ScatterNd of a step gets whole tensors.
    """

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(tf.math.top_k(x, 2)[0] ** 2)
        return tape.gradient(total, x) * x

    return _fails(gradient)


def sparse_cross_entropy_of_split_classes_is_wrong_in_float64() -> bool:
    """`tf.nn.sparse_softmax_cross_entropy_with_logits` of classes that are split is wrong in float64 and bfloat16,
    without an error: zero, or not a number. In float32 and float16 it is right.

    Instead: the classes are gathered before it in these precisions.
    """
    mesh, _ = _split_by_rows()
    logits, labels = tf.constant(X, tf.float64) / 8, tf.range(8) % 4
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits).numpy()
    split = dtensor.Layout([dtensor.UNSHARDED, "rows"], mesh)
    on_mesh = dtensor.pack(tf.split(logits, RANKS, 1), split)
    labels = dtensor.pack([labels] * RANKS, dtensor.Layout.replicated(mesh, 1))
    with dtensor.default_mesh(mesh):
        found = tf.function(tf.nn.sparse_softmax_cross_entropy_with_logits)(labels, on_mesh)
    return not np.allclose(dtensor.unpack(found)[0].numpy(), expected)


def a_new_dim_before_a_split_one_ends_the_process() -> bool:
    """`x[None]` of a tensor whose rows are split fails with a text of random bytes, or ends the process.

    Instead: the slice has no new dims, and `tf.expand_dims` adds them.
    """
    return _fails(lambda x: x[None] * 2.0)


def space_to_batch_has_no_rule() -> bool:
    """A dilated convolution is refused: "'tf.SpaceToBatchND' op does not implement layout propagation".

    Instead: reshape and transpose move the phases of the positions behind the rows.
    """

    def dilated(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.convolution(tf.reshape(x, (8, 2, 2, 1)), tf.ones((2, 2, 1, 1)), padding="SAME", dilations=2)

    return _fails(dilated)


def grouped_convolutions_need_onednn_or_xla() -> bool:
    """On CPUs the gradient of a convolution in groups fails ("filter_size does not have enough elements") without
    oneDNN, which TensorFlow turns on by itself only for processors with AVX-512. DTensor does not compile with XLA.

    Instead: each group is a convolution of its own.
    """
    kernel = tf.ones((3, 3, 2, 4))

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            total = tf.reduce_sum(tf.nn.convolution(x, kernel, padding="SAME"))
        return tape.gradient(total, kernel)

    try:
        gradient(tf.ones((2, 4, 4, 4)))
    except tf.errors.OpError:
        return True
    return False


def the_gradient_of_a_branch_ends_the_process() -> bool:
    """The gradient of `tf.cond` or `tf.switch_case` on split rows is refused ("'tf.OptionalFromValue' op does not
    implement layout propagation"). With such operations whole on every rank, by DTensor's own flag, it is a
    segmentation fault, also where the branch acts row by row (`python -m tests.engine_bugs.dtensor_flow`).

    Instead: a step with branches is computed on one device, from gathered weights (ADR 023).
    """
    from tests.engine_bugs import dtensor_flow

    mesh, x = _split_by_rows()
    dtensor_flow.outcome("tf.cond, row-wise, gradient", mesh, x, whole=True)
    return False


def a_python_function_ends_the_process() -> bool:
    """`tf.numpy_function` (`tf.py_function` too) in a step on a mesh, whole on every rank by DTensor's own flag, is a
    segmentation fault, or waits for ever.

    Instead: a step with such a function is computed on one device, from gathered weights.
    """
    os.environ["DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.PYFUNC"] = "1"
    signal.alarm(20)  # where it waits, with Python's lock held
    return _fails(lambda x: x + tf.ensure_shape(tf.numpy_function(lambda value: 2 * value, [x], x.dtype), x.shape))


def a_convolution_of_no_rows_has_other_channels() -> bool:
    """With oneDNN a convolution of a tensor [0, 2, 2, 3] by 4 filters has the shape [0, 2, 2, 3].

    Instead: a replica without rows convolves a row of zeros, and drops it from the result.
    """
    return tf.nn.conv2d(tf.zeros((0, 2, 2, 3)), tf.zeros((1, 1, 3, 4)), 1, "SAME").shape[-1] != 4


def a_tensor_of_nine_dims_cannot_be_cut() -> bool:
    """Cutting a replicated tensor of more than 8 dims fails as it runs ("SliceOp : Unhandled input dimensions"). The
    gradients of `tf.tile` and `tf.repeat` are such tensors, with two dims for each of the input's.

    Instead: gradients of our own add up the copies dim by dim.
    """
    mesh, _ = _split_by_rows()
    x = dtensor.copy_to_mesh(tf.ones([RANKS] + [1] * 8), dtensor.Layout.replicated(mesh, 9))
    try:
        cut = dtensor.relayout(x, dtensor.Layout.batch_sharded(mesh, "rows", 9))
        np.concatenate([part.numpy() for part in dtensor.unpack(cut)])
    except tf.errors.OpError:
        return True
    return False


def a_function_that_was_refused_ends_the_process() -> bool:
    """Calling a `tf.function` a second time, after DTensor refused it and its operation was allowed, is a segmentation
    fault.

    Instead: the step is traced anew.
    """
    mesh, x = _split_by_rows()
    function = tf.function(lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[1.0, 2.0]))
    with dtensor.default_mesh(mesh):
        try:
            function(x)
        except tf.errors.OpError:
            os.environ["DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.BUCKETIZE"] = "1"
            function(x)
    return False


def all_to_all_exchanges_in_the_order_of_devices() -> bool:
    """From split rows to split columns, parts are exchanged in the order of devices, not of the mesh: wrong, without an
    error, where ranks do not ascend along an axis (`[[3, 1], [0, 2]]`).

    Instead: DTensor's all-to-all is turned off; it gathers, then cuts.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    mesh = dtensor.create_mesh([("axis", 2)], devices=["CPU:1", "CPU:0"])
    rows, columns = (dtensor.Layout(specs, mesh) for specs in (["axis", "unsharded"], ["unsharded", "axis"]))
    x = dtensor.pack([tf.constant(part) for part in np.split(X, 2)], rows)
    parts = dtensor.unpack(tf.function(lambda x: dtensor.relayout(x, columns))(x))
    return not np.array_equal(np.concatenate([part.numpy() for part in parts], axis=1), X)


def an_error_of_a_rank_is_left_to_the_next_operation() -> bool:
    """After a function failed on one rank, the next operation on the mesh raises, whatever it is: reading a variable.

    Instead: a weight is read until the errors of all ranks are collected; the one that is not "cancelled" is raised.
    """
    mesh, x = _split_by_rows()
    whole = dtensor.Layout.replicated(mesh, 1)
    variable = dtensor.DVariable(dtensor.pack([tf.zeros((2,))] * RANKS, whole))
    with dtensor.default_mesh(mesh):
        try:
            found = tf.function(lambda x: tf.reduce_sum(tf.gather(tf.ones((3,)), tf.cast(x, tf.int32))))(x)
            dtensor.unpack(found)[0].numpy()
        except tf.errors.OpError:
            pass
    try:
        dtensor.unpack(variable.read_value())[0].numpy()
    except tf.errors.OpError:
        return True
    return False


def a_collective_with_a_time_limit_keeps_its_threads() -> bool:
    """A collective with `timeout_seconds` keeps two threads until that time is over, also when it has ended; a program
    that calls one after the other runs out of them.

    Instead: `kf.comm` gives no limit to the operations; one thread looks at all, and ends the process's collectives.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keys = {"group_size": 2, "group_key": 1, "instance_key": 1, "timeout_seconds": 60.0}

    def both() -> list[tf.Tensor]:
        results = []
        for device in ("CPU:0", "CPU:1"):
            with tf.device(device):
                options = {"merge_op": "Add", "final_op": "Id", "ordering_token": []}
                results.append(tf.raw_ops.CollectiveReduceV2(input=tf.ones(1), **keys, **options))
        return results

    reduced = tf.compat.v1.wrap_function(both, [])  # in a tf.function one would wait for the other
    reduced()
    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        reduced()
    return len(os.listdir("/proc/self/task")) > before + 40


def adam_squares_the_slices_of_a_repeated_row_one_by_one() -> bool:
    """Adam, on slices of a gradient and on their sum (`keras_flow.compare.known_differences` says what it means)."""
    import keras

    weights = []
    for gradient in (tf.IndexedSlices(tf.ones((2, 1)), tf.constant([0, 0]), tf.constant([1, 1])), tf.constant([[2.0]])):
        table = keras.Variable(tf.ones((1, 1)))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([table])
        optimizer.apply([gradient])
        weights.append(table.numpy())
    return not np.allclose(*weights, rtol=1e-3)


def losses_of_outputs_weigh_a_short_batch_as_a_whole_one() -> bool:
    """`evaluate` of two outputs on 3 rows in batches of 2 (`keras_flow.compare.known_differences`)."""
    import keras

    inputs = keras.Input((1,))
    model = keras.Model(inputs, [keras.layers.Identity(name=name)(inputs) for name in ("a", "b")])
    model.compile("sgd", "mse")
    x = np.array([[0.0], [0.0], [3.0]], "float32")
    logs = model.evaluate(x, [np.zeros_like(x)] * 2, batch_size=2, verbose=0, return_dict=True)
    assert np.isclose(logs["loss"], 6.0), "the whole loss is by rows: 9 / 3 for each of the outputs"
    return bool(np.isclose(logs["a_loss"], 4.5))  # (0 + 9) / 2 batches, where 9 / 3 rows is meant


BUGS = (
    losses_of_outputs_weigh_a_short_batch_as_a_whole_one,
    adam_squares_the_slices_of_a_repeated_row_one_by_one,
    gradient_of_top_k_scatters_all_rows_on_one_rank,
    sparse_cross_entropy_of_split_classes_is_wrong_in_float64,
    a_new_dim_before_a_split_one_ends_the_process,
    space_to_batch_has_no_rule,
    grouped_convolutions_need_onednn_or_xla,
    the_gradient_of_a_branch_ends_the_process,
    a_python_function_ends_the_process,
    a_convolution_of_no_rows_has_other_channels,
    a_tensor_of_nine_dims_cannot_be_cut,
    a_function_that_was_refused_ends_the_process,
    an_error_of_a_rank_is_left_to_the_next_operation,
    a_collective_with_a_time_limit_keeps_its_threads,
    all_to_all_exchanges_in_the_order_of_devices,
)


def main() -> dict[str, bool]:
    """Bug -> whether it is there; each in a process of its own: one that ends it by a signal is there."""
    return {bug.__name__: _is_there(bug.__name__) for bug in BUGS}


def _is_there(name: str) -> bool:
    code = f"import sys; from tests.engine_bugs.tensorflow import {name} as bug; sys.exit(3 if bug() else 0)"
    onednn = "1" if name == a_convolution_of_no_rows_has_other_channels.__name__ else "0"
    options = {"TF_ENABLE_ONEDNN_OPTS": onednn, "DTENSOR_USE_ALL_TO_ALL_RELAYOUT": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {**os.environ, **options, "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode not in (0, 3) and done.returncode > 0:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return done.returncode != 0


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
