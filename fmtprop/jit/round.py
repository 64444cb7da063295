"""Kernel of roundings to a grid: of real numbers or of bytes of another grid, to bytes or to real numbers.

Rows may lie apart, as parts of a joint projection of queries, keys and values do. oneDNN's reorder rounds to bytes
alone, and PyTorch takes four passes.
"""

from __future__ import annotations

from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final

from fmtprop.jit.arguments import UNROLLED, Arguments, FloatVector, filled
from fmtprop.jit.ends import ROUNDING_FIELDS, Quantized, Rounding, ends
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: numbers of a piece of a tensor without gaps: few enough for equal shares of threads
_PIECE: Final = 4096


class RoundArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "dst")),
        *((name, c_uint64) for name in ("rows", "length", "pitch", "last", "blocks", "vectors")),
        *((name, FloatVector) for name in ("src_zero", "src_scale")),
        *ROUNDING_FIELDS,
    )


@dataclass(frozen=True)
class RoundKernel(StandaloneKernel):
    """``dst[r, i] = clamp(round(src[r, i] / scale), low, high) · scale``, stored as bytes or as real numbers."""

    stem = "round"

    rows: int
    length: int
    #: elements from row to row of src; dst has no gaps
    pitch: int
    #: what the bytes of src mean; None for f32
    src: Quantized | None
    #: bytes or f32
    dst: DataType
    rounding: Rounding

    @property
    def overwrites(self) -> bool:  # type: ignore[override]  # computed
        """Whether dst may be src: numbers that two vectors have are rounded twice, which changes none."""
        return self.src is None and self.dst is DataType.F32 and self.pitch == self.length

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return serves() and self.rows > 0 and self.length >= isa().lanes

    @property
    def _piece(self) -> int:
        """Numbers that are rounded at a time: a row, or a piece of a tensor without gaps."""
        return self.length if self.pitch != self.length else min(self.rows * self.length, _PIECE)

    def assembled(self) -> Kernel:
        """Return the code; problems of the same types and the same rest of a vector share it."""
        src = "f32" if self.src is None else self.src.dtype.value
        return assembled("round_program", "round_rows", isa(), src, self.dst.value, rest=self._piece % isa().lanes)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        count, piece = self.rows * self.length, self._piece
        (vectors, rest), meaning = divmod(piece, isa().lanes), self.src or Quantized(DataType.F32, 1.0, 0)
        is_whole = self.pitch == self.length
        arguments = RoundArguments(
            rows=-(-count // piece),
            length=piece,
            pitch=piece if is_whole else self.pitch,
            last=count - piece if is_whole else (self.rows - 1) * self.pitch,
            blocks=vectors // UNROLLED,
            vectors=vectors % UNROLLED,
            src_zero=filled(meaning.zero),
            src_scale=filled(meaning.scale),
            **ends(self.rounding, rest, isa()),
        )
        return StandaloneWork(self.kernel, arguments, threads_for(4 * count, threads))
