"""Machine code of the project's own, for what oneDNN's primitives do slowly: functions of single numbers.

Owns the code, the memory that it is executed from and the threads that run it. Must not know nodes, plans or formats:
a kernel sees a row of numbers.
"""

from fmtprop.jit.kernel import CHUNK_NBYTES, Kernel, Work, kernel_for, unavailable

__all__ = ["CHUNK_NBYTES", "Kernel", "Work", "kernel_for", "unavailable"]
