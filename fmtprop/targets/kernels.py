"""Nodes that kernels of our own compute instead of a primitive: the one table of them.

:mod:`fmtprop.targets.kernel` runs the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fmtprop.ir import Attrs, Node
from fmtprop.ops import (
    Attention,
    Binary,
    Conv,
    DynamicQuantize,
    Eltwise,
    Lookup,
    LstmBytes,
    MatMul,
    Pooling,
    Reduction,
    RmsNorm,
)
from fmtprop.ops.batch_norm_training import BatchStatistics
from fmtprop.ops.embedding_bag import EmbeddingBag
from fmtprop.ops.gather_nbits import GatherNBits
from fmtprop.ops.host_call import HostCall
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.matmul_nbits import DecodeNBits, MatMulNBits
from fmtprop.ops.normalization import BatchNorm, GroupNorm, LayerNorm
from fmtprop.ops.quantization import Dequantize, FakeQuantize
from fmtprop.ops.recurrent import Recurrent
from fmtprop.ops.rotary_embedding import RotaryEmbedding
from fmtprop.ops.softmax import Softmax
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.as_rows import Way
from fmtprop.targets.attention import attention_kernels
from fmtprop.targets.byte_products import byte_products
from fmtprop.targets.depthwise import depthwise_kernels
from fmtprop.targets.folds import averages_of_bytes, global_poolings, reductions
from fmtprop.targets.gemv import gemv_kernels
from fmtprop.targets.grouped_convolution import grouped_convolution_kernels
from fmtprop.targets.kernel import JIT, KernelImplementation
from fmtprop.targets.nbits import decode_kernels, gather_kernels, nbits_kernels
from fmtprop.targets.norms import batch_normalized, group_normalized, normalized_as_given, normalized_rows
from fmtprop.targets.pointwise import applied, broadcasts, combined, dequantized, looked_up, quantized, rotated, rounded
from fmtprop.targets.recurrent import lstm_of_bytes, recurrent_layers
from fmtprop.targets.tables import bags, copied_rows, put_rows

#: from a node, its attributes and formats to the kernels for it; perhaps this machine has none of such sizes
_Ways = Callable[[Node, Any, Request], Iterator[Way]]


def _products(node: Node, attrs: Attrs, request: Request) -> Iterator[Way]:
    return byte_products(node, request)


#: kernels that take post-ops, or tell which nodes they take
_WITH_POST_OPS: Mapping[type[Attrs], tuple[_Ways, ...]] = {
    InnerProduct: (_products, lambda node, attrs, request: gemv_kernels(node, request)),
    MatMul: (_products, lambda node, attrs, request: gemv_kernels(node, request)),
    GatherNBits: (lambda node, attrs, request: gather_kernels(attrs, request),),
    DecodeNBits: (lambda node, attrs, request: decode_kernels(attrs, request),),
    MatMulNBits: (lambda node, attrs, request: nbits_kernels(node, request),),
    Conv: (
        _products,
        lambda node, attrs, request: grouped_convolution_kernels(node, request),
        lambda node, attrs, request: depthwise_kernels(node, request),
    ),
    BatchNorm: (normalized_as_given,),
    Binary: (combined,),
    Pooling: (averages_of_bytes,),
    FakeQuantize: (rounded,),
    LayerNorm: (normalized_rows,),
    RmsNorm: (normalized_rows,),
    Softmax: (normalized_rows,),
}

#: kernels that take none
_ALONE: Mapping[type[Attrs], tuple[_Ways, ...]] = {
    GroupNorm: (group_normalized,),
    RotaryEmbedding: (rotated,),
    Lookup: (looked_up,),
    Dequantize: (dequantized,),
    DynamicQuantize: (quantized,),
    LstmBytes: (lstm_of_bytes,),
    HostCall: (copied_rows, put_rows),
    EmbeddingBag: (bags,),
    BatchStatistics: (batch_normalized,),
    Attention: (lambda node, attrs, request: attention_kernels(node, request),),
}

#: those whose operands and results also have one data type
_OF_ONE_TYPE: Mapping[type[Attrs], tuple[_Ways, ...]] = {
    Eltwise: (applied,),
    Binary: (broadcasts,),
    Reduction: (reductions,),
    Pooling: (global_poolings,),
    Recurrent: (recurrent_layers,),
}


def kernel_candidates(node: Node, request: Request) -> Iterator[Candidate]:
    """Yield the way to run a node by a kernel, if there is one for it and for these formats."""
    for kernel, operands, results in _ways(node, request):
        if kernel.is_offered:
            yield Candidate(JIT, kernel.impl, operands, results, handle=KernelImplementation(kernel))


def _ways(node: Node, request: Request) -> Iterator[Way]:
    """Yield the kernels for a node and these formats; perhaps this machine has none of such sizes."""
    tables = [_WITH_POST_OPS]
    if not node.post_ops:
        tables.append(_ALONE)
        if len({desc.dtype for desc in request.values()}) == 1:
            tables.append(_OF_ONE_TYPE)
    for table in tables:
        for ways in table.get(type(node.attrs), ()):
            yield from ways(node, node.attrs, request)
