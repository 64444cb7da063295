"""Every primitive constructor, by name: one import for whoever looks one up."""

from __future__ import annotations

from fmtprop.dnnl.convolution import (
    convolution_backward_data,
    convolution_backward_weights,
    convolution_forward,
    deconvolution_backward_data,
    deconvolution_backward_weights,
    deconvolution_forward,
)
from fmtprop.dnnl.data import (
    concat,
    reduction,
    reorder,
    resampling_backward,
    resampling_forward,
    shuffle_backward,
    shuffle_forward,
    sum,
)
from fmtprop.dnnl.matrix import (
    inner_product_backward_data,
    inner_product_backward_weights,
    inner_product_forward,
    matmul,
)
from fmtprop.dnnl.normalization import (
    batch_normalization_backward,
    batch_normalization_forward,
    group_normalization_backward,
    group_normalization_forward,
    layer_normalization_backward,
    layer_normalization_forward,
)
from fmtprop.dnnl.pointwise import (
    binary,
    eltwise_backward,
    eltwise_forward,
    prelu_backward,
    prelu_forward,
    softmax_backward,
    softmax_forward,
)
from fmtprop.dnnl.pooling import lrn_backward, lrn_forward, pooling_backward, pooling_forward

__all__ = [
    "batch_normalization_backward",
    "batch_normalization_forward",
    "binary",
    "concat",
    "convolution_backward_data",
    "convolution_backward_weights",
    "convolution_forward",
    "deconvolution_backward_data",
    "deconvolution_backward_weights",
    "deconvolution_forward",
    "eltwise_backward",
    "eltwise_forward",
    "group_normalization_backward",
    "group_normalization_forward",
    "inner_product_backward_data",
    "inner_product_backward_weights",
    "inner_product_forward",
    "layer_normalization_backward",
    "layer_normalization_forward",
    "lrn_backward",
    "lrn_forward",
    "matmul",
    "pooling_backward",
    "pooling_forward",
    "prelu_backward",
    "prelu_forward",
    "reduction",
    "reorder",
    "resampling_backward",
    "resampling_forward",
    "shuffle_backward",
    "shuffle_forward",
    "softmax_backward",
    "softmax_forward",
    "sum",
]
