"""`Compression`: the dtype in which gradients travel."""

from __future__ import annotations

from typing import Any

import keras


class NoneCompressor:
    """Tensors travel in their own dtype."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The tensor as it was."""
        return tensor


class FP16Compressor:
    """Floats travel, and are added up, in float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in float16 where it is of floats, and its own dtype."""
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return (keras.ops.cast(tensor, "float16"), dtype) if "float" in dtype else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The tensor in its own dtype."""
        return tensor if context is None else keras.ops.cast(tensor, context)


class Compression:
    """The compressors that there are.

    Example:
        >>> import keras, keras_flow.hvd as hvd
        >>> hvd.Compression.fp16.compress(keras.ops.ones(2))[1]
        'float32'
    """

    none = NoneCompressor
    fp16 = FP16Compressor
