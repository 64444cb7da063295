"""Machine code of the project: kernels for operations that are slow in oneDNN, and the loop that calls primitives.

Owns the code, its executable memory and the threads that run kernels. Must not know nodes, plans or formats: a kernel
sees rows of numbers, the loop sees functions and arguments.
"""

from fmtprop.jit.arguments import CHUNK_NBYTES
from fmtprop.jit.average import AverageBytesKernel
from fmtprop.jit.bag import BagKernel
from fmtprop.jit.batch_norms import BatchNormKernel
from fmtprop.jit.byte_products import ByteProductsKernel
from fmtprop.jit.calls import Call, CallList
from fmtprop.jit.combine import CombineKernel
from fmtprop.jit.denormals import flushed
from fmtprop.jit.depthwise import DepthwiseKernel
from fmtprop.jit.dequantize import DequantizeKernel
from fmtprop.jit.ends import Quantized, Rounding
from fmtprop.jit.gather import GatherKernel
from fmtprop.jit.gather_nbits import GatherNBitsKernel
from fmtprop.jit.gemv import GemvKernel, Tail
from fmtprop.jit.given_norm import GivenNormKernel
from fmtprop.jit.grouped_convolution import GroupedConvolutionKernel
from fmtprop.jit.kernel import ALONE_NBYTES, Kernel, Work, kernel_for, on_one_thread, unavailable
from fmtprop.jit.lookup import LookupKernel
from fmtprop.jit.lstm_bytes import LstmBytesKernel
from fmtprop.jit.memory import no_code
from fmtprop.jit.nbits import DecodeKernel, NBitsKernel
from fmtprop.jit.norms import GroupNormKernel
from fmtprop.jit.put import PutKernel
from fmtprop.jit.quantize_rows import QuantizeRowsKernel
from fmtprop.jit.recurrent import RecurrentKernel
from fmtprop.jit.rotary import RotaryKernel
from fmtprop.jit.round import RoundKernel
from fmtprop.jit.row_norm import RowNormKernel
from fmtprop.jit.rows import AverageKernel, BroadcastKernel, EltwiseKernel, FoldKernel, broadcast_kernel_for
from fmtprop.jit.softmax import SoftmaxKernel
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, offered
from fmtprop.jit.tiles import no_tiles
from fmtprop.jit.watch import Words

__all__ = [
    "ALONE_NBYTES",
    "CHUNK_NBYTES",
    "AverageBytesKernel",
    "AverageKernel",
    "BagKernel",
    "BatchNormKernel",
    "BroadcastKernel",
    "ByteProductsKernel",
    "Call",
    "CallList",
    "CombineKernel",
    "DecodeKernel",
    "DepthwiseKernel",
    "DequantizeKernel",
    "EltwiseKernel",
    "FoldKernel",
    "GatherKernel",
    "GatherNBitsKernel",
    "GemvKernel",
    "GivenNormKernel",
    "GroupNormKernel",
    "GroupedConvolutionKernel",
    "Kernel",
    "LookupKernel",
    "LstmBytesKernel",
    "NBitsKernel",
    "PutKernel",
    "QuantizeRowsKernel",
    "Quantized",
    "RecurrentKernel",
    "RotaryKernel",
    "RoundKernel",
    "Rounding",
    "RowNormKernel",
    "SoftmaxKernel",
    "StandaloneKernel",
    "StandaloneWork",
    "Tail",
    "Words",
    "Work",
    "broadcast_kernel_for",
    "flushed",
    "kernel_for",
    "no_code",
    "no_tiles",
    "offered",
    "on_one_thread",
    "unavailable",
]
