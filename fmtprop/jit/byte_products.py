"""Kernel of products of bytes where the CPU multiplies none exactly: AVX2 without VNNI.

oneDNN's products of bytes are pairs that are added in 16 bits there, which saturates, so what is stored as bytes would
be multiplied as f32. This kernel widens bytes to 16 bits and adds products in 32: twice as many products in an
instruction as of f32, and the same results as with VNNI.

A task is a tile of positions of an image, and some outputs. The part of the image that the tile reads is widened once,
less its zero point, with zeros around the image. Then 16 outputs at a time, which have their weights side by side, get
the sums of a few neighbouring positions, whose sums stay in registers. A matrix product is an image of one row.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from ctypes import addressof, c_byte, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from fmtprop.dnnl import lib
from fmtprop.jit.arguments import Arguments, BitVector, FloatVector, filled
from fmtprop.jit.grouped_convolution import Row
from fmtprop.jit.isa import AVX2
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for, writes
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: outputs whose weights lie side by side, and neighbouring inputs of an output among them
BLOCK: Final = 16
DEPTH: Final = 2

#: most positions whose sums are in registers: twelve vectors of 16
MOST_POSITIONS: Final = 6

#: bytes of a tile's widened numbers: a third of a second cache of 256 KB, which the weights of 16 outputs pass through
_TILE_NBYTES: Final = 96 << 10

#: most products of a sum: each is below 255 * 255, and the sum has 31 bits
_MOST_INPUTS: Final = (1 << 31) // 255**2

#: limit of the bytes of a position: some of them are a displacement in the code
_DISPLACEMENT_LIMIT: Final = 1 << 26

#: most post-ops with an operand, and most steps behind the sums
MOST_OPERANDS: Final = 4
MOST_STEPS: Final = 8

#: functions whose parameters are arguments: layers that differ in scales alone share the code
OF_ARGUMENTS: Final = frozenset({"linear", "round", "clip"})

#: oneDNN's algorithms of binary post-ops that the kernel has
_BINARY: Final = frozenset({"add", "sub", "mul", "div"})


class ByteProductsArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "weights", "bias", "dst", "factors", "table", "areas")),
        *((f"post_op_{number}", c_void_p) for number in range(MOST_OPERANDS)),
        *((f"{name}_row", c_int64) for name in ("dst", *(f"post_op_{number}" for number in range(MOST_OPERANDS)))),
        *((name, c_uint64) for name in ("area", "tasks", "groups", "group", "panels", "panel")),
        *((name, c_uint64) for name in ("across", "down", "width", "height", "last_x", "last_y", "last_block")),
        *((name, c_uint64) for name in ("dst_width", "dst_height", "src_width", "src_height")),
        *((name, c_int64) for name in ("stride_x", "stride_y", "pad_x", "pad_y", "tap", "tap_row")),
        *((name, c_uint64) for name in ("pixel", "src_row", "image", "tile_width", "tile_height", "tile_words")),
        *((name, c_uint64) for name in ("tile_step", "window_height", "window_width")),
        ("nothing", c_uint64),
        *((name, BitVector) for name in ("zero", "weights_zero", "keep_0", "keep_1")),
        *((f"{name}_{step}", FloatVector) for name in ("alpha", "beta") for step in range(MOST_STEPS)),
    )


class TailOperand(NamedTuple):
    """A post-op's second operand."""

    dtype: DataType
    #: numbers from position to position
    step: int
    #: whether it is one number for all outputs
    is_number: bool


class TailStep(NamedTuple):
    """What follows the sums: a function of one number, or of two."""

    #: oneDNN's name of the algorithm, without ``eltwise_`` or ``binary_``
    alg: str
    alpha: float = 0.0
    beta: float = 0.0
    operand: TailOperand | None = None
    #: number of the post-op that has the operand
    number: int = 0

    @property
    def is_written(self) -> bool:
        """Whether the kernel can have it."""
        if self.operand is not None:
            types = (DataType.F32,) if self.operand.is_number else (DataType.F32, DataType.U8, DataType.S8)
            return self.alg in _BINARY and self.operand.dtype in types and self.number < MOST_OPERANDS
        return self.alg in OF_ARGUMENTS or writes(self.alg, self.alpha, self.beta)

    @property
    def form(self) -> TailStep:
        """What is a part of the code."""
        alpha, beta = (0.0, 0.0) if self.alg in OF_ARGUMENTS else (self.alpha, self.beta)
        operand = None if self.operand is None else self.operand._replace(step=0)
        return TailStep(self.alg, alpha, beta, operand, self.number)


@dataclass(frozen=True)
class ByteProductsKernel(StandaloneKernel):
    """``dst[p, n] = tail(factors[n] * sum over k of (src[p, k] - zero) * (weights[k, n] - weights_zero) + bias[n])``.

    `p` is a position of an image, `k` an input of its window.
    """

    stem = "byte_products"
    moves_freely = False
    overwrites = False  # blocks of positions overlap where they do not fill a tile

    images: int
    #: channels of src, and of dst
    inputs: int
    outputs: int
    height: Row
    width: Row
    #: data types of src, weights and dst
    src: DataType
    weights: DataType
    dst: DataType
    #: the bytes that stand for 0
    zero: int
    weights_zero: int
    #: numbers from position to position of dst
    dst_step: int
    has_bias: bool = False
    tail: tuple[TailStep, ...] = ()

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, and has no better one of oneDNN's, for these sizes."""
        if not is_needed():
            return False
        # of half a vector, only words can be read and written
        ends = {self.dst, *(one.operand.dtype for one in self.tail if one.operand is not None)}
        return (
            self.dst in (DataType.F32, DataType.U8, DataType.S8)
            and (self.outputs % BLOCK == 0 or ends == {DataType.F32})
            and self.inputs % DEPTH == 0
            and 0 < self.inputs * self.height.window * self.width.window <= _MOST_INPUTS
            and min(self.images, self.outputs, self.height.dst, self.width.dst) > 0
            and all(map(_is_seen, (self.height, self.width)))
            and self._tile()[0] > 0
            and self.width.stride * self.inputs * 2 * MOST_POSITIONS < _DISPLACEMENT_LIMIT
            and len(self.tail) <= MOST_STEPS
            and all(one.is_written for one in self.tail)
        )

    @property
    def limits(self) -> tuple[float, float] | None:
        """Least and largest number of dst, if it has bytes."""
        return {DataType.U8: (0.0, 255.0), DataType.S8: (-128.0, 127.0)}.get(self.dst)

    @property
    def _taps(self) -> int:
        """Parts of a window's row whose inputs follow one another."""
        return self.width.window if self.width.step > 1 else 1

    @property
    def positions(self) -> int:
        """Positions whose sums are in registers."""
        return -(-self.width.dst // -(-self.width.dst // MOST_POSITIONS))

    def _tile(self) -> tuple[int, int]:
        """Return the width and height, in positions, of equal tiles; (0, 0) if even the smallest are too large."""
        blocks = -(-self.width.dst // self.positions)

        def nbytes(count: int, height: int) -> int:
            width = min(count * self.positions, self.width.dst)
            return self._read(self.width, width) * self._read(self.height, height) * self.inputs * 2

        across = bisect(range(1, blocks + 1), _TILE_NBYTES, key=lambda count: nbytes(count, 1))
        if across < blocks:
            return (min(_share(blocks, across) * self.positions, self.width.dst), 1) if across else (0, 0)
        down = bisect(range(1, self.height.dst + 1), _TILE_NBYTES, key=lambda height: nbytes(blocks, height))
        return self.width.dst, _share(self.height.dst, down)

    @staticmethod
    def _read(axis: Row, positions: int) -> int:
        """Return how many positions of src some positions of dst read along an axis."""
        return (positions - 1) * axis.stride + (axis.window - 1) * axis.step + 1

    def assembled(self) -> Kernel:
        """Return the code; problems that differ in other sizes share it."""
        return assembled(
            *("byte_products_program", "byte_products", self.positions, self.width.stride * self.inputs * 2),
            *(self.inputs * self.width.window // self._taps // DEPTH, self._taps > 1, self.outputs % BLOCK),
            *(self.src, self.weights, self.dst, self.zero != 0, self.weights_zero != 0, self.has_bias),
            tuple(one.form for one in self.tail),
            self.limits,
        )

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        width, height = self._tile()
        across, down = -(-self.width.dst // width), -(-self.height.dst // height)
        tiles, panels = self.images * across * down, -(-self.outputs // BLOCK)
        products = self.images * self.height.dst * self.width.dst * self.outputs * self.inputs
        threads = threads_for(products, threads)
        # where tiles are few, threads share the outputs, too
        group = -(-panels // min(panels, -(-2 * threads // tiles) if threads > 1 else 1))
        read_x, read_y = self._read(self.width, width), self._read(self.height, height)
        tile_row = read_x * self.inputs * 2
        taps, read = self._taps, self.inputs * self.width.window * 2 // self._taps
        tap = self.width.step * self.inputs * 2 - read if taps > 1 else 0
        area = (read_y * tile_row // 64 + 1) * 64
        block = (c_byte * (threads * area + 64))()
        rest = self.outputs % BLOCK or BLOCK
        keep = [[0xFFFFFFFF * (half * 8 + lane < rest) for lane in range(8)] + [0] * 8 for half in range(2)]
        arguments = ByteProductsArguments(
            table=addressof(self.kernel.rows),
            areas=-(-addressof(block) // 64) * 64,
            area=area,
            tasks=tiles * -(-panels // group),
            groups=-(-panels // group),
            group=group,
            panels=panels,
            panel=self.height.window * self.width.window * self.inputs * BLOCK,
            across=across,
            down=down,
            width=width,
            height=height,
            last_x=self.width.dst - width,
            last_y=self.height.dst - height,
            last_block=width - self.positions,
            dst_width=self.width.dst,
            dst_height=self.height.dst,
            src_width=self.width.src,
            src_height=self.height.src,
            stride_x=self.width.stride,
            stride_y=self.height.stride,
            pad_x=self.width.pad,
            pad_y=self.height.pad,
            pixel=self.inputs,
            src_row=self.width.src * self.inputs,
            image=self.height.src * self.width.src * self.inputs,
            tile_width=read_x,
            tile_height=read_y,
            tile_words=tile_row // 2,
            tile_step=self.height.stride * tile_row,
            window_height=self.height.window,
            window_width=taps,
            tap=tap,
            tap_row=self.height.step * tile_row - taps * (read + tap),
            zero=_words(self.zero),
            weights_zero=_words(self.weights_zero),
            keep_0=BitVector(*keep[0]),
            keep_1=BitVector(*keep[1]),
            dst_row=self.dst_step * self.dst.nbytes,
            **{
                f"post_op_{one.number}_row": one.operand.step * one.operand.dtype.nbytes
                for one in self.tail
                if one.operand is not None
            },
            **{f"alpha_{number}": filled(one.alpha) for number, one in enumerate(self.tail)},
            **{f"beta_{number}": filled(one.beta) for number, one in enumerate(self.tail)},
        )
        return StandaloneWork(self.kernel, arguments, threads, keep=block)

    def scale(self, work: StandaloneWork, factors: Sequence[float]) -> object:
        """Let the kernel's work multiply by factors, of each output or one for all; return them, to be kept."""
        each = factors if len(factors) > 1 else [*factors] * self.outputs
        numbers = (c_float * (-(-self.outputs // BLOCK) * BLOCK))(*each)  # of whole blocks of outputs
        work.point["factors"](addressof(numbers))
        return numbers


def is_needed() -> bool:
    """Return whether this machine adds products of bytes in 16 bits, and no kernel of oneDNN's is as good."""
    return serves() and isa() is AVX2 and not lib().includes("avx2_vnni")


def _is_seen(axis: Row) -> bool:
    """Return whether each window has a position of src, if there is only this axis."""
    return axis.pad <= (axis.window - 1) * axis.step and (axis.dst - 1) * axis.stride - axis.pad < axis.src


def _share(count: int, most: int) -> int:
    """Return the size of equal shares that are not larger than the largest."""
    return -(-count // -(-count // most))


def _words(value: int) -> Any:
    """Return a vector of a number of 16 bits."""
    return BitVector(*[(value & 0xFFFF) * 0x10001] * 16)
