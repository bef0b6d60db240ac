"""Operations that DTensor cannot partition: they run whole on every rank instead of failing.

DTensor reads one environment flag for each operation when it compiles the first function that has it. Without the flag
such a function fails with "op does not implement layout propagation". There is no flag for all operations at once.
"""

from __future__ import annotations

import os

#: operations that DTensor has a rule for (REGISTER_SPMD in its sources, TensorFlow 2.21), and those that it replaces by
#: others before it looks for rules
WITH_RULE = frozenset(
    """
Const Abs Cast Identity Neg ZerosLike OnesLike Exp Sqrt Rsqrt Log StopGradient Reciprocal Square Erf Tanh TanhGrad
Relu ReluGrad Sigmoid SigmoidGrad IsFinite Add AddV2 AddN RealDiv Div DivNoNan Equal FloorDiv FloorMod NotEqual
Less LessEqual LogicalAnd LogicalNot Maximum Minimum Mul Select SelectV2 Sub SquaredDifference Greater
GreaterEqual RsqrtGrad SqrtGrad Pow BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift LogicalOr Cos Acos Acosh
Angle Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e Betainc Bitcast Ceil CheckNumerics ClipByValue Conj Cosh
Complex ComplexAbs Digamma Elu EluGrad Erfc Erfinv Expm1 Floor Igamma Igammac IgammaGradA Imag Inv Invert IsInf
IsNan LeakyRelu LeakyReluGrad Lgamma Log1p MulNoNan Ndtri NextAfter Polygamma PopulationCount PreventGradient Real
ReciprocalGrad Relu6 Relu6Grad Rint Round Selu SeluGrad Sign Sin Sinh Softplus Softsign Tan TruncateDiv
TruncateMod Xdivy Xlog1py Xlogy Zeta IdentityN Range All Any Mean Max Min Prod Sum L2Loss Conv2D
Conv2DBackpropFilter Conv2DBackpropFilterV2 Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D Conv3DBackpropFilter
Conv3DBackpropFilterV2 Conv3DBackpropInput Conv3DBackpropInputV2 MaxPool MaxPoolGrad Rank Shape ShapeN
BroadcastGradientArgs AssignVariableOp AssignAddVariableOp AssignSubVariableOp ReadVariableOp VarHandleOp
VarIsInitializedOp DestroyResourceOp Einsum BatchMatMulV2 MatMul Pack Unpack Reshape Transpose InvertPermutation
Pad PadV2 GatherV2 GatherNd ResourceGather ScatterNd TensorScatterUpdate TensorScatterAdd ArgMax Slice
StridedSlice TensorStridedSliceUpdate StridedSliceGrad Split SplitV Squeeze Concat ConcatV2
SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits Softmax LogSoftmax StatelessRandomUniform
StatelessRandomUniformFullInt StatelessRandomNormal StatelessTruncatedNormal StatelessRandomGetKeyCounter
RngReadAndSkip StatelessRandomNormalV2 StatelessRandomUniformV2 StatelessRandomUniformFullIntV2
StatelessRandomUniformIntV2 StatelessTruncatedNormalV2 Fill Tile ResourceApplyAdagradV2 ResourceApplyAdam
ResourceApplyGradientDescent ResourceApplyCenteredRMSProp ResourceApplyKerasMomentum ResourceApplyMomentum Assert
OneHot ExpandDims UnsortedSegmentSum BroadcastTo SaveV2 MergeV2Checkpoints RestoreV2 CopyToMesh CopyToMeshGrad
Relayout RelayoutLike TopKV2 InTopKV2 BiasAdd BiasAddGrad Qr AvgPool AvgPool3D MaxPool3D DepthwiseConv2dNative
ResizeBilinear ResizeNearestNeighbor AdjustContrastv2 AdjustSaturation FFT FFT2D FFT3D IFFT IFFT2D IFFT3D IRFFT
IRFFT2D IRFFT3D RFFT RFFT2D RFFT3D Cholesky MaxPool3DGrad MaxPool3DGradGrad MaxPoolGradGrad ResizeBilinearGrad
ResizeNearestNeighborGrad DiagPart Cumsum SparseToDense StringFormat StringToHashBucketFast TensorListReserve
TensorListGetItem TensorListSetItem WriteSummary FlushSummaryWriter DisableCopyOnRead ShardedFilename
OptionalHasValue OptionalGetValue IteratorGetNext IteratorGetNextAsOptional RandomUniform RandomUniformInt Unique
Placeholder NoOp While StatelessWhile If StatelessIf Case StatelessCase PartitionedCall StatefulPartitionedCall
""".split()
)
#: operations without a rule in Keras's layers, losses, metrics and optimizers, which may run eagerly too
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


def allow_whole_operations() -> None:
    """Set the flags of what may run outside of a traced step; a flag that the user set stays."""
    for operation in WHOLE_OPERATIONS:
        os.environ.setdefault(_flag(operation), "1")


def allow_whole_operation(operation: str) -> bool:
    """Set the flag of an operation without a rule; whether it was not set before."""
    if _flag(operation) in os.environ:
        return False
    os.environ[_flag(operation)] = "1"
    return True


def _flag(operation: str) -> str:
    return f"DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.{operation.upper()}"
