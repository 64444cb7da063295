"""Kernels of batch normalization with given statistics: a factor and a summand for each channel.

oneDNN's kernel for bf16 takes one and a half times as long (`bnorm_jit`, v3.2). A first call makes the factors, with
PyTorch's formula; then each position is the one of a depthwise convolution's window.
"""

from __future__ import annotations

from ctypes import addressof, c_byte, c_uint64, c_void_p
from dataclasses import dataclass

from fmtprop.jit.arguments import Arguments, FloatVector, filled
from fmtprop.jit.depthwise import DepthwiseKernel
from fmtprop.jit.gemv import Tail
from fmtprop.jit.grouped_convolution import Row
from fmtprop.jit.kernel import Kernel, isa
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType


class FactorArguments(Arguments):
    """Arguments of the code that makes factors and summands; `last` is in bytes."""

    _fields_ = (
        *((name, c_void_p) for name in ("scale", "shift", "mean", "variance", "factors", "summands")),
        *(("last", c_uint64), ("epsilon", FloatVector), ("one", FloatVector)),
    )


@dataclass(frozen=True)
class GivenNormKernel(StandaloneKernel):
    """``dst = tail((src - mean) / sqrt(variance + epsilon) * scale + shift)``, with channels innermost."""

    stem = "given_norm"

    rows: int
    places: int
    channels: int
    epsilon: float
    #: data type of src and dst; the vectors of channels are f32
    dtype: DataType
    has_scale: bool
    has_shift: bool
    tail: tuple[Tail, ...] = ()

    @property
    def _affine(self) -> DepthwiseKernel:
        heights, row = (self.rows, self.rows, 1, 1, 1, 0), Row(self.places, self.places, 1, 1, 1, 0)
        return DepthwiseKernel(*(1, self.channels, heights, row, self.dtype), has_bias=True, tail=self.tail, wide=True)

    @property
    def _factors(self) -> Kernel:
        options = {"has_scale": self.has_scale, "has_shift": self.has_shift}
        return assembled("given_norm_program", "factors", isa(), **options)

    @property
    def overwrites(self) -> bool:  # type: ignore[override]  # the same, computed
        """Whether dst may be src: not where the last vector of channels overlaps the one before, and is read again."""
        return self.channels % isa().lanes == 0

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return self._affine.is_offered

    def assembled(self) -> Kernel:
        """Return the code of the positions."""
        return self._affine.assembled()

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the kernel's results and speed."""
        return self.kernel.fingerprint + self._factors.fingerprint

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        vector = self.channels * 4
        made = (c_byte * (2 * vector))()
        arguments = FactorArguments(
            factors=addressof(made),
            summands=addressof(made) + vector,
            last=vector - isa().nbytes,
            epsilon=filled(self.epsilon),
            one=filled(1.0),
        )
        first, work = StandaloneWork(self._factors, arguments, 1, keep=made), self._affine.work(threads)
        work.point["weights"](addressof(made))
        work.point["bias"](addressof(made) + vector)
        work.begin_with(first)
        return work
