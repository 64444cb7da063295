"""Kernels that compute a whole node instead of a primitive: their names in plans, and the binding of their tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from ctypes import addressof, c_byte
from functools import cache, cached_property, partial
from importlib import import_module
from typing import ClassVar, TypeVar

from fmtprop.jit.arguments import Arguments, address_of
from fmtprop.jit.calls import Call
from fmtprop.jit.kernel import BoundKernel, Kernel, isa, serves
from fmtprop.layout import DataType

#: operands and results that a program's arguments can point to
_TENSORS = frozenset(
    {"src", "src_0", "src_1", "src_2", "key", "value", "mask_0", "mask_1", "scale", "shift", "mean", "variance", "dst"}
    | {"diff_dst", "diff_src", "diff_scale", "diff_shift", "weights", "bias", "cos", "sin"}
    | {
        "past_key",
        "past_value",
        "key_scales",
        "value_scales",
        "past_key_scales",
        "past_value_scales",
        "table",
        "scales",
        "zero_points",
        "zero_point",
        "indices",
        "offsets",
        "factors",
        "zero",
        "src_h",
        "src_c",
        "sums",
        "dst_h",
        "dst_c",
        "src_layer",
        "src_iter",
        "src_iter_c",
        "weights_layer",
        "weights_iter",
        "dst_layer",
        "dst_iter",
        "dst_iter_c",
    }
    | {f"post_op_{number}" for number in range(4)}
)

#: alignment of a thread's area
_LINE_NBYTES = 64


@cache
def assembled(module: str, program: str, *arguments: Hashable, name: str = "", **options: Hashable) -> Kernel:
    """Return the code of a program. Few networks need the assembler, so it is imported only here.

    `name`: name of the kernel; by default the program's.
    """
    made = getattr(import_module(f"fmtprop.jit.{module}"), program)(*arguments, **options)
    return Kernel(name or program, *(made if isinstance(made, tuple) else (made,)))


class StandaloneKernel(ABC):
    """A kernel that computes a whole node; a dataclass of its sizes."""

    #: whether it moves each byte once, at the speed of a copy
    moves_freely: ClassVar[bool] = True

    #: whether dst may be src: each number is read before any number is written in its place
    overwrites: bool = True

    #: whether it changes a part of an operand, in place if dst is that
    changes: ClassVar[bool] = False

    #: whether it accepts any numbers; otherwise its work begins with a check
    takes_any_numbers: ClassVar[bool] = True

    @property
    @abstractmethod
    def stem(self) -> str:
        """The operation, in a word or two."""

    @property
    @abstractmethod
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""

    @abstractmethod
    def assembled(self) -> Kernel:
        """Return the code; problems that differ only in sizes may share it."""

    @abstractmethod
    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""

    @property
    def impl(self) -> str:
        """The kernel's name in plans and reports."""
        return f"{self.stem}:{isa().name}"

    @property
    def repro(self) -> str:
        """A description in place of the benchdnn command line of a primitive."""
        return f"fmtprop.jit kernel {self.impl} of {self}"

    @cached_property
    def kernel(self) -> Kernel:
        """The code."""
        return self.assembled()

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the kernel's results and speed."""
        return self.kernel.fingerprint


AnyKernel = TypeVar("AnyKernel", bound=StandaloneKernel)


def offered(kernel: AnyKernel) -> AnyKernel | None:
    """Return a kernel; None if this machine has none for its sizes."""
    return kernel if kernel.is_offered else None


class ChannelKernel(StandaloneKernel):
    """A kernel on rows of channels, whole vectors of them; each thread has an area of memory for its sums."""

    places: int
    channels: int
    dtype: DataType

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        sizes = (getattr(self, "images", 1), self.places, self.channels)  # a batch normalization has places only
        return serves(self.dtype, meeting=True) and 0 not in sizes and self.channels % isa().lanes == 0

    @property
    def vectors(self) -> int:
        """Number of vectors in a row of channels."""
        return self.channels // isa().lanes

    def divisor(self, most: int) -> int:
        """Return the largest divisor of `vectors` that is not above a number."""
        return next(size for size in range(most, 0, -1) if self.vectors % size == 0)

    def areas(self, threads: int, slots: int) -> tuple[object, dict[str, int]]:
        """Return memory for the threads' areas, and the arguments that tell where they are.

        `slots`: vectors of an area for each vector of channels; the number of a thread's places comes before its area.
        """
        area = _LINE_NBYTES + self.channels * slots * 4
        block = (c_byte * (threads * area + 2 * _LINE_NBYTES))()
        first = (addressof(block) // _LINE_NBYTES + 2) * _LINE_NBYTES
        return block, {"barrier": address_of("GOMP_barrier") or 0, "areas": first, "area": area}


class StandaloneWork(BoundKernel):
    """A kernel with its tensors, for one thread of Python at a time.

    `kernel`, `arguments`, `threads`: see :class:`fmtprop.jit.kernel.BoundKernel`. Arguments that point to operands and
    results have the operands' names. `check`: returns a status other than 0 if the kernel must not run on the present
    numbers.
    """

    def __init__(
        self, kernel: Kernel, arguments: Arguments, threads: int, keep: object = None, check: Call | None = None
    ) -> None:
        super().__init__(kernel, arguments, threads)
        self._keep = keep
        #: the calls of a run
        self.calls: tuple[Call, ...] = (self.call,) if check is None else (check, self.call)
        names = {name for name, *_ in arguments._fields_} & _TENSORS
        #: oneDNN's name of an operand or result -> function that sets its address
        self.point: Mapping[str, Callable[[int], None]] = {name: partial(setattr, arguments, name) for name in names}

    def begin_with(self, other: StandaloneWork) -> None:
        """Run another kernel before this one, with operands and results of its own."""
        self.calls, self.point = (*other.calls, *self.calls), {**self.point, **other.point}
        self._keep = (self._keep, other)
