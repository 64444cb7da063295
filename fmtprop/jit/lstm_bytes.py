"""Kernel of a layer of an LSTM that rounds its state to bytes: all steps of all sequences, in one call.

In a step, the state is rounded, 16 states at a time get the sums of their four gates, as integers, and the functions
behind these. What would be a dozen short steps of a plan takes longer than the products.

Weights have blocks of 16 rows, with four neighbouring numbers of each side by side. AVX-512 VNNI multiplies them as
bytes. The products of AVX2 are added in pairs of 16 bits, which have no room for two of 8 bits without sign. So codes
are less by 128, and weights get their signs: the magnitudes are at most 128 and 127. Where a weight is -128, which has
no opposite, codes are split in their last bits and the others.
"""

from __future__ import annotations

from ctypes import addressof, c_byte, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final

from fmtprop.dnnl import lib
from fmtprop.jit.arguments import UNROLLED, Arguments, BitVector, FloatVector, filled
from fmtprop.jit.isa import AVX2, AVX512, Isa
from fmtprop.jit.kernel import Kernel, isa, serves
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled

#: rows of a block of weights, and neighbouring numbers of a row in it
BLOCK: Final = 16
DEPTH: Final = 4

GATES: Final = 4

#: most sequences that share a load of weights: their sums of four gates have half of the registers of AVX-512; those of
#: a gate, nearly all of AVX2
MOST_ROWS: Final = {AVX512: 4, AVX2: 3}

#: limit of the bytes of a gate's weights: the fourth gate's are a displacement in the code
_GATE_LIMIT: Final = 1 << 28


class LstmBytesArguments(Arguments):
    """Arguments of the code; those of the rounding are the same as of :mod:`fmtprop.jit.quantize_rows`."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "src_h", "src_c", "weights", "scales", "sums")),
        *((name, c_void_p) for name in ("dst", "dst_h", "dst_c", "table", "codes", "scale", "zero")),
        *(
            (name, c_uint64)
            for name in ("times", "states", "state_nbytes", "whole_groups", "blocks", "vectors", "rest")
        ),
        *((name, c_int64) for name in ("src_first", "src_step", "src_row", "dst_first", "dst_step", "dst_row")),
        *((name, FloatVector) for name in ("divisor", "least", "one", "low", "high")),
        *(
            (name, BitVector)
            for name in ("magnitude", "bytes", "half", "once", "middle", "top", "upper", "last", "twice")
        ),
    )


@dataclass(frozen=True)
class LstmBytesKernel(StandaloneKernel):
    """``dst[t], h, c = step(src[t] + scales * scale of h * (weights @ codes of h - zero of h * sums), c)``."""

    stem = "lstm_bytes"
    moves_freely = False
    overwrites = False

    times: int
    #: sequences
    rows: int
    #: numbers of a sequence's state
    states: int
    reverse: bool
    #: numbers from step to step, and from sequence to sequence, of src and of dst
    src_steps: tuple[int, int]
    dst_steps: tuple[int, int]
    #: whether no weight is -128
    symmetric_weights: bool

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        is_whole = self.states > 0 and self.states % BLOCK == 0 and self.states**2 < _GATE_LIMIT
        return serves() and is_whole and self.times > 0 and self.rows > 0

    @property
    def machine(self) -> Isa:
        """The instruction set of the code: AVX-512 only with products of bytes."""
        return AVX2 if isa() is AVX512 and not lib().includes("avx512_core_vnni") else isa()

    @property
    def group(self) -> int:
        """Sequences that share a load of weights."""
        return min(MOST_ROWS[self.machine], self.rows)

    def assembled(self) -> Kernel:
        """Return the code; layers that differ in the number of steps and in strides share it."""
        return assembled(
            "lstm_bytes_program", "lstm_bytes", self.machine, self.rows, self.states, self.group, self.symmetric_weights
        )

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later. It has one thread: steps are short."""
        count = self.rows * self.states
        vectors = count // self.machine.lanes
        codes, range_ = (c_byte * (2 * count))(), (c_float * 2)()
        last = self.times - 1 if self.reverse else 0
        way = -1 if self.reverse else 1
        arguments = LstmBytesArguments(
            table=addressof(self.kernel.rows),
            codes=addressof(codes),
            scale=addressof(range_),
            zero=addressof(range_) + 4,
            times=self.times,
            states=4 * self.states,
            state_nbytes=4 * count,
            whole_groups=4 * (self.rows - self.rows % self.group) * self.states,
            blocks=vectors // UNROLLED,
            vectors=vectors % UNROLLED,
            rest=0,
            src_first=4 * last * self.src_steps[0],
            src_step=4 * way * self.src_steps[0],
            src_row=4 * self.src_steps[1],
            dst_first=4 * last * self.dst_steps[0],
            dst_step=4 * way * self.dst_steps[0],
            dst_row=4 * self.dst_steps[1],
            divisor=filled(255.0),
            least=filled(0.0),
            one=filled(1.0),
            low=filled(0.0),
            high=filled(255.0),
            magnitude=BitVector(*[0x7FFFFFFF] * 16),
            bytes=BitVector(*[0x0C080400] * 16),
            half=BitVector(*[0x7FFF] * 16),
            once=BitVector(*[0x00010001] * 16),
            middle=BitVector(*[128] * 16),
            top=BitVector(*[0x80808080] * 16),
            upper=BitVector(*[0x7F7F7F7F] * 16),
            last=BitVector(*[0x01010101] * 16),
            twice=BitVector(*[0x00020002] * 16),
        )
        return StandaloneWork(self.kernel, arguments, 1, keep=(codes, range_))
