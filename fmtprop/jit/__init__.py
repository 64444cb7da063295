"""Machine code of the project's own: functions of single numbers, and the loop that calls a plan's primitives.

oneDNN does the first slowly, Python the second. Owns the code, the memory that it is executed from and the threads
that run kernels. Must not know nodes, plans or formats: a kernel sees a row of numbers, the loop functions and
arguments.
"""

from fmtprop.jit.calls import Call, CallList
from fmtprop.jit.kernel import CHUNK_NBYTES, Kernel, Work, kernel_for, unavailable
from fmtprop.jit.memory import no_code

__all__ = ["CHUNK_NBYTES", "Call", "CallList", "Kernel", "Work", "kernel_for", "no_code", "unavailable"]
