"""Operations that DTensor cannot partition: they run whole on every rank instead of failing.

DTensor reads one environment flag for each operation when it compiles the first function that has it. Without the flag
such a function fails with "op does not implement layout propagation". There is no flag for all operations at once.
"""

from __future__ import annotations

import os

#: operations without an SPMD expander in TensorFlow 2.21, met in Keras layers, losses, metrics and optimizers
WHOLE_OPERATIONS = (
    *("AvgPoolGrad", "AvgPool3D", "AvgPool3DGrad", "MaxPool3D", "MaxPool3DGrad", "LRN", "LRNGrad"),
    *("DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNativeBackpropInput"),
    *("FusedBatchNormV3", "FusedBatchNormGradV3"),
    *(
        "MatrixBandPart",
        "MatrixDiagPartV3",
        "MatrixDiagV3",
        "MatrixSetDiagV3",
        "Cumprod",
        "Roll",
        "ReverseV2",
        "LinSpace",
    ),
    *("DenseBincount", "LowerBound", "UpperBound", "TopKV2", "Unique", "RandomShuffle", "ResourceScatterAdd"),
    *("EmptyTensorList", "TensorListPushBack", "TensorListPopBack", "TensorListStack", "TensorListFromTensor"),
    *("TensorListLength", "TensorListElementShape"),
    *("MirrorPad", "MirrorPadGrad", "ImageProjectiveTransformV3", "AdjustContrastv2", "RGBToHSV", "HSVToRGB"),
)


#: operations not in the list that a step was found to have
found_on_the_way: set[str] = set()


def allow_whole_operations() -> None:
    """Set the flags; a flag that the user set stays."""
    for operation in WHOLE_OPERATIONS:
        os.environ.setdefault(_flag(operation), "1")


def allow_whole_operation(operation: str) -> bool:
    """Set the flag of an operation that DTensor asked a rule for; whether it was not set before."""
    if _flag(operation) in os.environ:
        return False
    os.environ[_flag(operation)] = "1"
    found_on_the_way.add(operation)
    return True


def _flag(operation: str) -> str:
    return f"DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.{operation.upper()}"
