"""Kernels of products of a few rows and a matrix of 4- or 8-bit codes, which are decoded in registers.

A step of a language model reads all its weights once: fewer bits are the only way to be faster than the memory. A code
`q` of a group stands for ``(q - zero point) * scale``, in f32; products and sums are f32 too, so results are those of
the decoded matrix.

With AVX2, one row needs no decoded numbers: the sum of a group's products with codes is multiplied by the group's
scale, and the zero point by the sum of the row's numbers. 4-bit codes of groups of 128 take 0.7 of the time (Zen 3).
A row with infinities, NaN or numbers whose sums may overflow is multiplied by decoded numbers.

Threads share the outputs, as in :mod:`fmtprop.jit.gemv`. Each thread first writes the rows of src to an area of its
own, as f32, the same vector of all rows side by side; for 4 bits, the numbers at even places of a unit come before
those at odd places. A byte has the codes of two neighbours, so the low halves of a unit's bytes meet the first part,
the high halves the second, and the matrix stays as files have it.

Rows of bf16 numbers may be integers of 16 bits with a scale for each group instead (AVX-512 VNNI): then 64 codes are
multiplied at a time, and the sums of a group are integers.
"""

from __future__ import annotations

from ctypes import addressof, c_byte, c_uint64, c_void_p
from dataclasses import dataclass
from struct import calcsize, pack
from typing import Final

from fmtprop.jit.arguments import Arguments
from fmtprop.jit.gemv import AT_OUTPUTS, MOST_POST_OPS, Tail
from fmtprop.jit.isa import AVX512, Isa
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: alignment of a thread's area, a line of cache
_LINE_NBYTES: Final = 64

#: limit of the bytes from the first row of an area to the last: they are a displacement in the code
_DISPLACEMENT_LIMIT: Final = 1 << 31

#: most numbers of a part of a group that is multiplied as integers: they are in registers while their largest is looked
#: for. A part of groups that are shorter than a vector of codes is as long as that.
_MOST_OF_PART: Final = 256

#: rows of a matrix that are decoded side by side into blocks, and rows of a block: products of many rows read these
ROWS: Final = 16
BLOCK: Final = 64

#: units of a group whose instructions follow one another, without a loop; longer groups are decoded in parts
MOST_UNITS: Final = 8


class NBitsArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("src", "weights", "scales", "zero_points", "indices", "data", "table", *AT_OUTPUTS)
        ),
        *((f"{name}_item", c_uint64) for name in ("src", "weights", *AT_OUTPUTS)),
        *((f"{name}_row", c_uint64) for name in ("src", *AT_OUTPUTS)),
        *(
            (name, c_uint64)
            for name in ("tasks", "item", "last", "row", "scales_row", "rows", "groups", "units", "outputs")
        ),
        *((name, c_uint64) for name in ("areas", "area", "count", "below", "reach")),
    )


def unit(machine: Isa) -> int:
    """Return the codes that are decoded together: two vectors of numbers."""
    return 2 * machine.lanes


def most_rows(machine: Isa) -> int:
    """Return the most rows, by the registers that hold sums: beyond, the matrix is better decoded once for all rows."""
    return machine.registers // 2


@dataclass(frozen=True)
class NBitsKernel(StandaloneKernel):
    """``dst[m, n] = tail(sum over k of src[m, k] * decoded[n, k] + bias[n])``."""

    stem = "nbits"

    #: `outputs`, `depth`: rows of the matrix, and codes of a row
    outputs: int
    depth: int
    #: bits of a code: without sign, two to a byte and the first in its low half; or a signed byte
    bits: int
    #: codes that share a scale
    group: int
    src: DataType
    dst: DataType
    #: whether each group has a zero point, in f32; otherwise it is 8 for 4 bits, and 0 for 8
    has_zero_points: bool = False
    #: data type of the bias; None without one
    bias: DataType | None = None
    tail: tuple[Tail, ...] = ()
    rows: int = 1
    #: name of src, dst or another tensor at the outputs, and numbers from row to row; those that are not named are the
    #: same for all rows
    row_steps: tuple[tuple[str, int], ...] = ()
    #: whether infinities of src must give what they give in PyTorch; as integers, they give NaN
    is_exact: bool = False

    @property
    def overwrites(self) -> bool:  # type: ignore[override]  # the same, computed
        """Whether dst may be a summand: not where the last task's outputs overlap those of the one before."""
        return self.outputs % isa().lanes == 0

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        machine = isa()
        if not serves(self.src, self.dst, self.bias or DataType.F32):
            return False
        if len(self.tail) > MOST_POST_OPS or not all(one.is_written for one in self.tail):
            return False
        if not 0 < self.rows <= most_rows(machine) or self.rows * self.depth * 4 >= _DISPLACEMENT_LIMIT:
            return False
        return _is_whole(self) and self.outputs >= machine.lanes

    def assembled(self) -> Kernel:
        """Return the code; problems that differ only in the number of outputs share it."""
        program = "nbits_integers" if self.part else "nbits"
        return assembled(f"{program}_program", program, isa(), self._without_sizes())

    def _without_sizes(self) -> NBitsKernel:
        return NBitsKernel(
            *(0, self.depth, self.bits, self.group, self.src, self.dst, self.has_zero_points, self.bias, self.tail),
            rows=self.rows,
            is_exact=self.is_exact,
        )

    @property
    def units(self) -> int:
        """Units that follow one another in the code."""
        return _units(self)

    @property
    def number_nbytes(self) -> int:
        """Bytes of a number of each row of src in a thread's area."""
        return 4 * self.rows

    @property
    def scales_sums(self) -> bool:
        """Whether the sums of a group are scaled, not its numbers: of one row, which has registers for both.

        AVX-512 has the scaled numbers of all 4-bit codes in a vector.
        """
        return self.rows == 1 and isa() is not AVX512

    @property
    def sums_nbytes(self) -> int:
        """Bytes before a group of src in a thread's area: sums of its numbers, which zero points multiply."""
        return isa().nbytes if self.scales_sums and (self.bits == 4 or self.has_zero_points) else 0

    @property
    def part(self) -> int:
        """Numbers of a group that share a scale as integers of 16 bits; 0 where rows are multiplied as f32."""
        if self.src is not DataType.BF16 or self.is_exact:
            return 0
        step = 8 * isa().nbytes // self.bits  # codes of a vector
        if step // self.group in (2, 4) and step % self.group == 0:
            return step if self.depth % step == 0 else 0
        return next((size for size in range(_MOST_OF_PART, 0, -step) if self.group % size == 0), 0)

    @property
    def groups_of_part(self) -> int:
        """Groups of a part; 1 where a group has several parts."""
        return max(1, self.part // self.group)

    @property
    def sums_of_part(self) -> int:
        """Vectors of sums of a row's part: each position of one is for other numbers, or one is for each group."""
        return 1 if self.rows == 1 else self.groups_of_part

    @property
    def part_nbytes(self) -> int:
        """Bytes of a row's part in a thread's area."""
        return 2 * self.part + (1 + (1 + self.has_zero_points) * self.sums_of_part) * isa().nbytes

    @property
    def rows_nbytes(self) -> int:
        """Bytes of all rows in a thread's area."""
        if self.part:
            return self.rows * self.depth // self.part * self.part_nbytes
        return self.rows * 4 * self.depth + self.depth // self.group * self.sums_nbytes

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        machine, row = isa(), self.depth * self.bits // 8
        threads = max(1, threads_for(self.outputs * row, threads))
        # behind the rows: a part of 16 outputs, whose codes programs on integers transpose
        part = ROWS * (8 * self.groups_of_part + self.part * self.bits // 8)
        area = -(-self.rows_nbytes // _LINE_NBYTES) * _LINE_NBYTES + part
        block = (c_byte * (threads * area + 2 * _LINE_NBYTES))()
        data = (c_byte * (len(levels := levels_of(machine)))).from_buffer_copy(levels)
        steps = dict(self.row_steps)
        arguments = NBitsArguments(
            **{f"{name}_row": step for name, step in steps.items() if name != "src"},
            src_row=steps.get("src", 0) * self.src.nbytes,
            table=addressof(self.kernel.rows),
            data=addressof(data),
            tasks=-(-self.outputs // machine.lanes),
            item=-(-self.outputs // machine.lanes),
            last=self.outputs - machine.lanes,
            row=row,
            scales_row=self.depth // self.group * 4,
            rows=self.rows,
            groups=self.depth // max(span(self), self.part),
            units=self.depth // (self.part or unit(machine)),
            areas=addressof(block) // _LINE_NBYTES * _LINE_NBYTES + _LINE_NBYTES,
            area=area,
        )
        return StandaloneWork(self.kernel, arguments, threads, keep=(block, data))


@dataclass(frozen=True)
class DecodeKernel(StandaloneKernel):
    """``dst[n, k] = (weights[n, k] - zero point) * scale``."""

    stem = "decode"

    outputs: int
    depth: int
    bits: int
    group: int
    dst: DataType
    has_zero_points: bool = False
    #: whether dst has blocks of 64 rows, with the numbers of a column (of bf16, of two columns) side by side
    is_blocked: bool = False

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        if self.is_blocked and (isa() is not AVX512 or self.outputs % BLOCK or self.group % unit(isa())):
            return False
        return serves(self.dst) and _is_whole(self) and self.outputs > 0

    def assembled(self) -> Kernel:
        """Return the code; matrices that differ only in sizes share it."""
        kernel = DecodeKernel(0, 0, self.bits, self.group, self.dst, self.has_zero_points, self.is_blocked)
        if self.is_blocked:
            return assembled("decode_program", "decode_blocked", isa(), kernel)
        return assembled("nbits_program", "decode", isa(), kernel)

    @property
    def units(self) -> int:
        """Units that follow one another in the code."""
        return _units(self)

    @property
    def number_nbytes(self) -> int:
        """Bytes of a number of dst."""
        return self.dst.nbytes

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        data = (c_byte * (len(levels := levels_of(isa())))).from_buffer_copy(levels)
        row = self.depth * self.dst.nbytes
        arguments = NBitsArguments(
            data=addressof(data),
            outputs=self.outputs,
            tasks=self.outputs // ROWS,
            row=self.depth * self.bits // 8,
            dst_row=row * (BLOCK if self.is_blocked else 1),
            scales_row=self.depth // self.group * 4,
            groups=self.depth // span(self),
        )
        return StandaloneWork(self.kernel, arguments, threads_for(self.outputs * row, threads), keep=data)


def _filled(form: str, number: float) -> bytes:
    return pack(f"<{64 // calcsize(form)}{form}", *[number] * (64 // calcsize(form)))


#: the largest integer of 16 bits that is 256 times a signed byte, plus another
LARGEST_INTEGER: Final = 127 * 256

#: vectors of constants in the order of the data, 64 bytes each: most are of the program that multiplies integers. Two
#: spread the scales of groups; sums of codes and larger numbers than the last may overflow where decoded ones do not
INTEGERS: Final = {
    "magnitude": _filled("I", 0x7FFFFFFF),
    "least": _filled("f", 2.0**-100),
    "largest": _filled("f", LARGEST_INTEGER),
    "of largest": _filled("f", 1.0 / LARGEST_INTEGER),
    "half": _filled("I", 128),
    "zero of 4": _filled("B", 8),
    "zero of 8": _filled("B", 128),
    "usual zero of 4": _filled("f", 8.0),
    "parts of zero of 4": _filled("f", -1 / 8),
    "parts of zero of 8": _filled("f", -1 / 128),
    "low": _filled("B", 15),
    "halves": pack("<16I", *[0] * 8, *[1] * 8),
    "quarters": pack("<16I", *[0] * 4, *[1] * 4, *[2] * 4, *[3] * 4),
    "too large": _filled("f", 2.0**100),
}


def span(kernel: NBitsKernel | DecodeKernel) -> int:
    """Return the codes whose scales are read together: those of a group, or of two where a unit has two."""
    return max(kernel.group, unit(isa()))


def _is_whole(kernel: NBitsKernel | DecodeKernel) -> bool:
    """Return whether groups are whole units, or halves of one, and rows are whole units and groups."""
    group, count = kernel.group, unit(isa())
    is_half = kernel.bits == 4 and isa() is AVX512 and 2 * group == count
    return kernel.depth > 0 and (group % count == 0 or is_half) and kernel.depth % span(kernel) == 0


def _units(kernel: NBitsKernel | DecodeKernel) -> int:
    """Return the units that follow one another in the code; a group has a whole number of such parts."""
    count = span(kernel) // unit(isa())
    return next(size for size in range(min(count, MOST_UNITS), 0, -1) if count % size == 0)


def levels_of(machine: Isa) -> bytes:
    """Return what programs read: numbers of 4-bit codes, with zero point 8 and without, and places of two vectors.

    The places are those of the numbers at even and at odd places, and those that put two such vectors in turn.
    """
    lanes, even = machine.lanes, range(0, 2 * machine.lanes, 2)
    in_turn = [place // 2 + place % 2 * lanes for place in range(2 * lanes)]
    numbers = [*(q - 8.0 for q in range(16)), *map(float, range(16))]
    places = pack(f"<{4 * lanes}i", *even, *(place + 1 for place in even), *in_turn)
    return pack("<32f", *numbers) + places + b"".join(INTEGERS.values())
