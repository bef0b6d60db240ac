"""Every operation of TensorFlow, and of Keras's functions on it, that is wrapped in a step on a mesh, and why.

Checked against keras 3.15 and tensorflow 2.21.
"""

from __future__ import annotations

from keras_flow.backends.hooking import Hook
from keras_flow.backends.tensorflow import (
    counting,
    graph_operations,
    images,
    linear_algebra,
    operations,
    slices,
    substitutes,
    windows,
)

_NUMPY = "keras:numpy"


def hooks() -> tuple[Hook, ...]:
    """The hooks on operations, the last group of `hooks.py`."""
    when = operations.in_traced_step
    concat = "joins local pieces in the wrong order, without an error, where the result is split along the joined dim"
    return (
        Hook(
            "tensorflow.python.framework.func_graph",
            "FuncGraph.capture",
            operations.capture,
            "constants of a Functional model: `got a regular tensor ... but was expecting a DTensor`",
            when=operations.captured_tensor,
        ),
        Hook(
            "tensorflow.python.framework.func_graph",
            "FuncGraph._create_op_internal",
            graph_operations.create,
            "gradients make operations that DTensor partitions wrongly (ScatterNd: indices of all rows on one rank's)",
            when=when,
        ),
        Hook(
            "tensorflow.python.ops.nn_ops",
            "top_k",
            operations.top_k,
            "needs the last dim whole; its gradient would be a ScatterNd of all rows",
            when=when,
            also=("tensorflow.math:top_k", "tensorflow.nn:top_k"),
        ),
        Hook("tensorflow", "concat", operations.concat, concat, when=when),
        Hook("tensorflow", "split", operations.split, "fails along a split dim; its gradient is tf.concat", when=when),
        Hook(
            "tensorflow.nn",
            "sparse_softmax_cross_entropy_with_logits",
            operations.sparse_softmax_cross_entropy,
            "in float64 and bfloat16 the loss of classes that are split is zero or not a number",
            when=when,
        ),
        Hook("tensorflow", "tile", operations.tile, "fails along a split dim", when=when),
        Hook("tensorflow", "pad", substitutes.pad, "fails along a split dim, and has no rule for mirrors", when=when),
        Hook("tensorflow", "slice", slices.slice, "its gradient fails along a split dim", when=when),
        Hook(
            "tensorflow.python.ops.array_ops",
            "strided_slice",
            slices.strided_slice,
            "a negative stride (x[::-1]) gives wrong numbers, a new dim before a split one (x[None]) ends the process, "
            "an integer before a split one (x[2]) splits another",
            when=when,
        ),
        *(
            Hook(module, function.__name__, function, "has no rule, or its gradient has none", when=when, also=also)
            for module, function, also in (
                ("tensorflow", substitutes.argmin, ("tensorflow.math:argmin",)),
                ("tensorflow", substitutes.reverse, ()),
                ("tensorflow", substitutes.roll, ()),
                ("tensorflow", substitutes.repeat, ()),
                ("tensorflow.math", substitutes.cumprod, ()),
                ("tensorflow", substitutes.reduce_prod, ("tensorflow.math:reduce_prod",)),
                ("tensorflow.math", substitutes.bessel_i0, ()),
                ("tensorflow.math", substitutes.softplus, ("tensorflow.nn:softplus",)),
                ("tensorflow.nn", substitutes.softsign, ("tensorflow.math:softsign",)),
                ("tensorflow.linalg", substitutes.cross, ()),
                ("tensorflow", substitutes.ensure_shape, ()),
                ("tensorflow", counting.searchsorted, ()),
                (_NUMPY, counting.histogram, ()),
                ("tensorflow.image", images.hsv_to_rgb, ()),
                ("tensorflow.image", images.rgb_to_hsv, ()),
                ("tensorflow.image", images.extract_patches, ()),
                ("tensorflow.image", images.resize, ()),
                ("tensorflow.nn", images.depth_to_space, ()),
                ("tensorflow.nn", images.space_to_depth, ()),
                ("tensorflow.nn", windows.pool, ()),
                ("tensorflow.nn", windows.depthwise_conv2d, ()),
            )
        ),
        Hook(
            _NUMPY,
            "nanquantile",
            counting.nanquantile,
            "has no rule, or its gradient has none",
            when=when,
        ),
        *(
            Hook(
                f"tensorflow.python.ops.{module}",
                name,
                function,
                "has no rule, or its gradient has none; TensorFlow's gradients use it too",
                when=when,
                also=also,
            )
            for module, name, function, also in (
                ("array_ops_stack", "unstack", substitutes.unstack, ("tensorflow:unstack",)),
                ("array_ops", "one_hot", counting.one_hot, ("tensorflow:one_hot",)),
                ("array_ops", "matrix_band_part", linear_algebra.band_part, ("tensorflow.linalg:band_part",)),
                ("array_ops", "matrix_diag", linear_algebra.diag, ("tensorflow.linalg:diag",)),
                ("array_ops", "matrix_diag_part", linear_algebra.diag_part, ("tensorflow.linalg:diag_part",)),
                ("array_ops", "matrix_set_diag", linear_algebra.set_diag, ("tensorflow.linalg:set_diag",)),
                (
                    "linalg_ops",
                    "matrix_triangular_solve",
                    linear_algebra.triangular_solve,
                    ("tensorflow.linalg:triangular_solve",),
                ),
                ("linalg_ops", "matrix_solve", linear_algebra.solve, ("tensorflow.linalg:solve",)),
                ("linalg_ops", "matrix_inverse", linear_algebra.inverse, ("tensorflow.linalg:inv",)),
                ("linalg_ops", "matrix_determinant", linear_algebra.determinant, ("tensorflow.linalg:det",)),
                (
                    "gen_linalg_ops",
                    "log_matrix_determinant",
                    linear_algebra.log_determinant,
                    ("tensorflow.linalg:slogdet",),
                ),
                ("math_ops", "unsorted_segment_max", counting.segment_max, ("tensorflow.math:unsorted_segment_max",)),
                ("math_ops", "unsorted_segment_min", counting.segment_min, ("tensorflow.math:unsorted_segment_min",)),
                (
                    "math_ops",
                    "unsorted_segment_prod",
                    counting.segment_prod,
                    ("tensorflow.math:unsorted_segment_prod",),
                ),
                (
                    "gen_image_ops",
                    "image_projective_transform_v3",
                    images.projective_transform,
                    ("tensorflow.raw_ops:ImageProjectiveTransformV3",),
                ),
            )
        ),
        Hook(
            "keras:core",
            "dynamic_update_slice",
            substitutes.update_slice,
            "an operation of XLA, which has no rule",
            when=when,
        ),
        *(
            Hook(
                _NUMPY,
                name,
                operations.contract,
                "parts of a contracted dim would be rounded to half precision before they are summed",
                when=operations.half_precision,
            )
            for name in ("matmul", "einsum")
        ),
        Hook(
            "tensorflow.python.framework.error_interpolation",
            "parse_message",
            operations.parse_message,
            "an error of DTensor quotes the whole program; TensorFlow searches it for minutes before it raises",
            when=operations.endless_text,
        ),
        Hook(
            "keras.layers.RNN",
            "call",
            operations.recurrent,
            "DTensor fails on the steps of sequences that are split by features",
            when=when,
        ),
        Hook(
            "keras:rnn",
            "rnn",
            operations.unrolled,
            "DTensor fails on the gradient of a loop (TensorListReserve: dimension -2^63)",
            when=when,
        ),
    )
