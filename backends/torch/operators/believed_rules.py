"""Operators whose DTensor rules are believed: each was compared with one device, in every layout, with its gradient.

What is not here is computed on gathered tensors (`gathered_whole`). Operators that act element by element are known by
torch's own tag, and need not be named.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch._decomp


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _names(
    """alias detach view _unsafe_view reshape expand permute transpose t squeeze unsqueeze slice select split
    split_with_sizes unbind slice_backward select_backward view_as_real view_as_complex"""
)
_MADE_LIKE = _names(
    """clone contiguous _to_copy zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    new_empty_strided"""
)
_REDUCTIONS = _names(
    """sum mean prod amax amin max min any all argmax argmin var std var_mean logsumexp linalg_vector_norm nansum"""
)
_PRODUCTS = _names("mm addmm bmm baddbmm dot convolution convolution_backward")
_ALONG_A_DIM = _names(
    """_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax cumsum cumprod logcumsumexp
    cummax cummin sort topk kthvalue flip roll gather scatter scatter_add index_select median mode
    unfold_copy diagonal diagonal_scatter select_scatter slice_scatter _fft_c2c _fft_c2r _fft_r2c"""
)
_REARRANGING = _names(
    "cat stack repeat tril triu constant_pad_nd where index index_put embedding embedding_dense_backward bucketize"
)
_MATRICES = _names(
    """cholesky linalg_cholesky_ex linalg_inv_ex _linalg_det _linalg_slogdet _linalg_eigh _linalg_svd _linalg_solve_ex
    linalg_qr linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_solve_triangular linalg_matrix_exp linalg_cross
    triangular_solve cholesky_solve cholesky_inverse"""
)
_NETWORKS = _names(
    """native_layer_norm native_layer_norm_backward native_group_norm nll_loss_forward nll_loss_backward
    nll_loss2d_forward nll_loss2d_backward max_pool1d_with_indices max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices avg_pool2d avg_pool2d_backward avg_pool3d
    avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward native_dropout native_dropout_backward
    _adaptive_avg_pool3d _adaptive_avg_pool3d_backward im2col col2im
    adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward
    replication_pad1d replication_pad2d replication_pad3d replication_pad1d_backward replication_pad2d_backward
    replication_pad3d_backward reflection_pad1d reflection_pad2d reflection_pad3d reflection_pad1d_backward
    reflection_pad2d_backward reflection_pad3d_backward hardshrink_backward softshrink_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"""
)
#: attention on GPUs: not compared with one device here; torch tests these rules itself
_ON_GPUS = _names(
    """_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"""
)
_TRUSTED = (
    _VIEWS | _MADE_LIKE | _REDUCTIONS | _PRODUCTS | _ALONG_A_DIM | _REARRANGING | _MATRICES | _NETWORKS | _ON_GPUS
)
_COMPARING = _names("amax amin max min median mode kthvalue sort topk cummax cummin linalg_vector_norm nansum")
#: operators that torch itself writes as several others, which are believed
_TAKEN_APART = _names(
    """elu_backward hardtanh_backward hardswish hardswish_backward softplus_backward log_sigmoid_forward
    log_sigmoid_backward leaky_relu_backward hardsigmoid_backward floor_divide isin unfold_backward diagonal_backward
    _prelu_kernel _prelu_kernel_backward glu glu_backward fill zero count_nonzero index_add aminmax std_mean
    smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits
    native_group_norm_backward diag_embed rot90 pixel_shuffle complex unfold
    diagonal_copy"""
)


@functools.cache
def is_trusted(operator: torch._ops.OpOverload) -> bool:
    """Whether DTensor's rule for an operator is believed."""
    namespace, name = operator.namespace, operator._schema.name.partition("::")[2]
    if namespace != "aten":  # collectives, and a user's own operators with rules of their own
        return True
    if name in _TAKEN_APART:
        return False
    if torch.Tag.pointwise in operator.tags or torch.Tag.inplace_view in operator.tags:
        return True
    return name in _TRUSTED or name.startswith(("_foreach_", "_fused_adam", "_amp_"))


def is_taken_apart(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator is computed by the others that torch takes it apart into."""
    name = operator._schema.name.partition("::")[2]
    return name in _TAKEN_APART and operator in torch._decomp.decomposition_table


def may_divide_by_zero(operator: torch._ops.OpOverload, args: Sequence[object]) -> bool:
    """Whether an operator divides by a tensor, or by the number zero.

    Of the summands 2 and -1 of a partial sum that makes inf and -inf, whose sum is nan, where the sum divided is inf.
    """
    if operator._schema.name.partition("::")[2] != "div":
        return False
    divisor = args[1] if len(args) > 1 else None
    return isinstance(divisor, torch.Tensor) or divisor == 0


def rounds(operator: torch._ops.OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """Whether an operator casts to a dtype of fewer digits: the sum of rounded summands is not the rounded sum."""
    if operator._schema.name.partition("::")[2] != "_to_copy":
        return False
    source, target = getattr(args[0], "dtype", None), kwargs.get("dtype")
    if not isinstance(source, torch.dtype) or not isinstance(target, torch.dtype) or not source.is_floating_point:
        return False
    return not target.is_floating_point or torch.finfo(target).eps > torch.finfo(source).eps


@functools.cache
def compares(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator, or its gradient, looks at single elements of its input.

    At those that equal the result, or are nan: summands of a partial sum say nothing of them.
    """
    return operator._schema.name.partition("::")[2] in _COMPARING
