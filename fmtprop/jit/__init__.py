"""Machine code of the project's own: kernels for what oneDNN does slowly, and the loop that calls a plan's primitives.

Owns the code, the memory that it is executed from and the threads that run kernels. Must not know nodes, plans or
formats: a kernel sees numbers in a row, or rows of channels; the loop, functions and arguments.
"""

from fmtprop.jit.calls import Call, CallList
from fmtprop.jit.channelwise import ChannelKernel, channel_kernel_for
from fmtprop.jit.kernel import CHUNK_NBYTES, Kernel, Work, kernel_for, unavailable
from fmtprop.jit.memory import no_code
from fmtprop.jit.rows import BroadcastKernel, FoldKernel, broadcast_kernel_for, fold_kernel_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork

__all__ = [
    "CHUNK_NBYTES",
    "BroadcastKernel",
    "Call",
    "CallList",
    "ChannelKernel",
    "FoldKernel",
    "Kernel",
    "StandaloneKernel",
    "StandaloneWork",
    "Work",
    "broadcast_kernel_for",
    "channel_kernel_for",
    "fold_kernel_for",
    "kernel_for",
    "no_code",
    "unavailable",
]
