"""Every op, one file per family, collected explicitly."""

from fmtprop.ir import OPSET, Graph
from fmtprop.ops.attention import ATTENTION, Attention
from fmtprop.ops.batch_norm_training import BATCH_NORMALIZATION_BACKWARD, BATCH_NORMALIZATION_TRAINING
from fmtprop.ops.binary import BINARY, Binary
from fmtprop.ops.building import emit
from fmtprop.ops.concat import CONCAT, Concat
from fmtprop.ops.convolution import CONVOLUTION, Conv
from fmtprop.ops.convolution_backward import CONVOLUTION_BACKWARD_DATA, CONVOLUTION_BACKWARD_WEIGHTS, ConvGradient
from fmtprop.ops.deconvolution import DECONVOLUTION, Deconv
from fmtprop.ops.dynamic_quantization import DYNAMIC_QUANTIZE, DynamicQuantize
from fmtprop.ops.eltwise import ELTWISE, Eltwise
from fmtprop.ops.eltwise_backward import ELTWISE_BACKWARD
from fmtprop.ops.embedding_bag import EMBEDDING_BAG, EmbeddingBag
from fmtprop.ops.gather_nbits import GATHER_NBITS, GatherNBits
from fmtprop.ops.grouped_matmul import GROUPED_MATMUL, GroupedMatmul
from fmtprop.ops.grouped_nbits import GROUPED_MATMUL_NBITS, GroupedNBits
from fmtprop.ops.host import ATEN
from fmtprop.ops.host_call import HostCall
from fmtprop.ops.inner_product import INNER_PRODUCT, InnerProduct
from fmtprop.ops.layer_norm_training import LAYER_NORMALIZATION_BACKWARD, LAYER_NORMALIZATION_TRAINING
from fmtprop.ops.lookup import LOOKUP, Lookup
from fmtprop.ops.lrn import LRN, Lrn
from fmtprop.ops.lstm_bytes import LSTM_BYTES, LstmBytes
from fmtprop.ops.matmul import MATMUL, MatMul
from fmtprop.ops.matmul_nbits import DECODE_NBITS, MATMUL_NBITS, DecodeNBits, MatMulNBits
from fmtprop.ops.normalization import (
    BATCH_NORMALIZATION,
    GROUP_NORMALIZATION,
    LAYER_NORMALIZATION,
    BatchNorm,
    GroupNorm,
    LayerNorm,
)
from fmtprop.ops.pad import PAD, Pad
from fmtprop.ops.pooling import POOLING, Pooling
from fmtprop.ops.pooling_backward import POOLING_BACKWARD
from fmtprop.ops.prelu import PRELU, PRELU_BACKWARD, Prelu
from fmtprop.ops.quantization import DEQUANTIZE, FAKE_QUANTIZE, QUANTIZE, Dequantize, FakeQuantize, Quantize
from fmtprop.ops.recurrent import LBR_GRU, LSTM, VANILLA_RNN, Recurrent
from fmtprop.ops.recurrent_training import OPS as RECURRENT_TRAINING
from fmtprop.ops.reduction import REDUCTION, Reduction
from fmtprop.ops.reorder import REORDER, Reorder
from fmtprop.ops.resampling import RESAMPLING, Resampling
from fmtprop.ops.rms_norm import RMS_NORMALIZATION, RmsNorm
from fmtprop.ops.rotary_embedding import ROTARY_EMBEDDING, RotaryEmbedding
from fmtprop.ops.shuffle import SHUFFLE, Shuffle
from fmtprop.ops.slice1 import slice1
from fmtprop.ops.softmax import SOFTMAX, Softmax
from fmtprop.ops.softmax_backward import SOFTMAX_BACKWARD
from fmtprop.ops.sum import SUM, Sum
from fmtprop.ops.views import EXPAND, PERMUTE, RESHAPE, SLICE, Expand, Permute, Reshape, Slice

#: every declaration, in the order of the documentation
OPS = (
    CONVOLUTION,
    CONVOLUTION_BACKWARD_DATA,
    CONVOLUTION_BACKWARD_WEIGHTS,
    DECONVOLUTION,
    INNER_PRODUCT,
    MATMUL,
    MATMUL_NBITS,
    DECODE_NBITS,
    GATHER_NBITS,
    GROUPED_MATMUL,
    GROUPED_MATMUL_NBITS,
    LOOKUP,
    ATTENTION,
    VANILLA_RNN,
    LSTM,
    LBR_GRU,
    LSTM_BYTES,
    *RECURRENT_TRAINING,
    POOLING,
    POOLING_BACKWARD,
    BATCH_NORMALIZATION,
    BATCH_NORMALIZATION_TRAINING,
    BATCH_NORMALIZATION_BACKWARD,
    LAYER_NORMALIZATION,
    LAYER_NORMALIZATION_TRAINING,
    LAYER_NORMALIZATION_BACKWARD,
    GROUP_NORMALIZATION,
    RMS_NORMALIZATION,
    ROTARY_EMBEDDING,
    LRN,
    RESAMPLING,
    ELTWISE,
    ELTWISE_BACKWARD,
    PRELU,
    PRELU_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    BINARY,
    SUM,
    CONCAT,
    REDUCTION,
    SHUFFLE,
    REORDER,
    QUANTIZE,
    DEQUANTIZE,
    FAKE_QUANTIZE,
    DYNAMIC_QUANTIZE,
    RESHAPE,
    PERMUTE,
    SLICE,
    EXPAND,
    PAD,
    EMBEDDING_BAG,
    ATEN,
)

OPSET.update({declaration.name: declaration for declaration in OPS})

__all__ = [
    "OPS",
    "Attention",
    "BatchNorm",
    "Binary",
    "Concat",
    "Conv",
    "ConvGradient",
    "DecodeNBits",
    "Deconv",
    "Dequantize",
    "DynamicQuantize",
    "Eltwise",
    "EmbeddingBag",
    "Expand",
    "FakeQuantize",
    "GatherNBits",
    "Graph",
    "GroupNorm",
    "GroupedMatmul",
    "GroupedNBits",
    "HostCall",
    "InnerProduct",
    "LayerNorm",
    "Lookup",
    "Lrn",
    "LstmBytes",
    "MatMul",
    "MatMulNBits",
    "Pad",
    "Permute",
    "Pooling",
    "Prelu",
    "Quantize",
    "Recurrent",
    "Reduction",
    "Reorder",
    "Resampling",
    "Reshape",
    "RmsNorm",
    "RotaryEmbedding",
    "Shuffle",
    "Slice",
    "Softmax",
    "Sum",
    "emit",
    "slice1",
]
