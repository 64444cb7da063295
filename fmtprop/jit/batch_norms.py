"""Kernels of batch normalization in training and its gradient on channels-last tensors, with a ReLU or a clip behind.

oneDNN fuses no clip, and a ReLU only with a workspace. Separately, the function reads and writes the whole tensor once
more, and its gradient reads two tensors and writes one. These kernels read src twice, and write the result once; the
gradient computes the limited numbers anew, from src and the statistics.

A thread has some places, see :mod:`fmtprop.jit.norms`.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_uint64, c_void_p
from dataclasses import dataclass
from math import inf, nan
from typing import ClassVar

from fmtprop.jit.arguments import Arguments, FloatVector, filled
from fmtprop.jit.kernel import Kernel, isa, threads_for
from fmtprop.jit.standalone import ChannelKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: vectors of a thread's area for each vector of channels
_SLOTS = {"batch_norm": 4, "batch_norm_gradient": 8}

#: registers for each vector of channels, and others
_REGISTERS = {"batch_norm": (3, 3), "batch_norm_gradient": (5, 5)}

_SIZES = tuple((name, c_uint64) for name in ("places", "row", "dst_row", "columns", "vectors", "area"))
_NUMBERS = tuple((name, FloatVector) for name in ("divisor", "epsilon", "one", "low", "high"))


class BatchNormArguments(Arguments):
    """Arguments of the code of a batch normalization."""

    _fields_ = (
        *((name, c_void_p) for name in ("barrier", "src", "scale", "shift", "dst", "mean", "variance", "areas")),
        *_SIZES,
        *_NUMBERS,
    )


class BatchNormGradientArguments(Arguments):
    """Arguments of the code of its gradient."""

    _fields_ = (
        *((name, c_void_p) for name in ("barrier", "src", "mean", "variance", "scale", "shift", "diff_dst", "areas")),
        *((name, c_void_p) for name in ("diff_src", "diff_scale", "diff_shift")),
        *_SIZES,
        ("diff_row", c_uint64),
        *_NUMBERS,
    )


@dataclass(frozen=True)
class BatchNormKernel(ChannelKernel):
    """``dst[:, c] = min(max((src[:, c] - mean[c]) / deviation[c] * scale[c] + shift[c], low), high)``, or gradient."""

    places: int
    channels: int
    #: elements from place to place: of src and dst, or of src, diff_src and diff_dst
    pitches: tuple[int, ...]
    epsilon: float
    limits: tuple[float, float] | None
    #: data type of the tensors; computed in f32, as the vectors are
    dtype: DataType
    #: whether it computes the gradients by src, scale and shift
    gradient: bool = False

    #: it reads its operands twice
    moves_freely: ClassVar[bool] = False

    @property
    def stem(self) -> str:
        """The operation."""
        return "batch_norm_gradient" if self.gradient else "batch_norm"

    @property
    def width(self) -> int:
        """Number of vectors of channels that are treated at a time: a divisor of `vectors`."""
        each, others = _REGISTERS[self.stem]
        return self.divisor((isa().registers - others) // each)

    def assembled(self) -> Kernel:
        """Return the code; problems with the same `width` share it."""
        options = {"limited": self.limits is not None, "bf16": self.dtype is DataType.BF16}
        return assembled("batch_norm_program", self.stem, isa(), self.width, **options)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later, scale and shift if there are any."""
        size = self.dtype.nbytes
        threads = threads_for(self.places * self.channels * size, threads)
        block, areas = self.areas(threads, _SLOTS[self.stem])
        ones, zeros, unread = ((c_float * self.channels)(*[n] * self.channels) for n in (1.0, 0.0, 0.0))
        row, dst_row, *diff_row = (pitch * size for pitch in self.pitches)
        low, high = self.limits or (-inf, inf)
        if self.gradient and high == inf:
            high = nan  # an infinite result is not limited
        more: dict[str, int] = {}
        if self.gradient:
            more = {"diff_row": diff_row[0], **dict.fromkeys(("diff_scale", "diff_shift"), addressof(unread))}
        make = BatchNormGradientArguments if self.gradient else BatchNormArguments
        arguments = make(
            **areas,
            scale=addressof(ones),
            shift=addressof(zeros),
            places=self.places,
            row=row,
            dst_row=dst_row,
            columns=self.vectors // self.width,
            vectors=self.vectors,
            divisor=filled(self.places),
            epsilon=filled(self.epsilon),
            one=filled(1.0),
            low=filled(low),
            high=filled(high),
            **more,
        )
        return StandaloneWork(self.kernel, arguments, threads, (block, ones, zeros, unread))
