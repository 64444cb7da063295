"""Machine code of the project: kernels for operations that are slow in oneDNN, and the loop that calls primitives.

Owns the code, its executable memory and the threads that run kernels. Must not know nodes, plans or formats: a kernel
sees rows of numbers, the loop sees functions and arguments.
"""

from fmtprop.jit.batch_norms import BatchNormKernel, batch_norm_kernel_for
from fmtprop.jit.calls import Call, CallList
from fmtprop.jit.gather import GatherKernel, gather_kernel_for
from fmtprop.jit.gemv import GemvKernel, Tail, gemv_kernel_for
from fmtprop.jit.kernel import ALONE_NBYTES, CHUNK_NBYTES, Kernel, Work, kernel_for, on_one_thread, unavailable
from fmtprop.jit.memory import no_code
from fmtprop.jit.norms import GroupNormKernel, group_norm_kernel_for
from fmtprop.jit.rms_norm import RmsNormKernel, rms_norm_kernel_for
from fmtprop.jit.rotary import RotaryKernel, rotary_kernel_for
from fmtprop.jit.rows import AverageKernel, FoldKernel, average_kernel_for, broadcast_kernel_for, fold_kernel_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork
from fmtprop.jit.watch import Watch

__all__ = [
    "ALONE_NBYTES",
    "CHUNK_NBYTES",
    "AverageKernel",
    "BatchNormKernel",
    "Call",
    "CallList",
    "FoldKernel",
    "GatherKernel",
    "GemvKernel",
    "GroupNormKernel",
    "Kernel",
    "RmsNormKernel",
    "RotaryKernel",
    "StandaloneKernel",
    "StandaloneWork",
    "Tail",
    "Watch",
    "Work",
    "average_kernel_for",
    "batch_norm_kernel_for",
    "broadcast_kernel_for",
    "fold_kernel_for",
    "gather_kernel_for",
    "gemv_kernel_for",
    "group_norm_kernel_for",
    "kernel_for",
    "no_code",
    "on_one_thread",
    "rms_norm_kernel_for",
    "rotary_kernel_for",
    "unavailable",
]
