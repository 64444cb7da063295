"""What kernels have in common that run instead of a primitive: how they are called, and how they find their tensors."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping
from ctypes import c_uint, c_void_p
from functools import cached_property

from fmtprop.jit.calls import Call
from fmtprop.jit.kernel import ALONE_NBYTES, Kernel, isa, runtime_function

__all__ = ["Pointer", "StandaloneKernel", "StandaloneWork"]


class StandaloneKernel(ABC):
    """A kernel that computes a whole node."""

    @property
    @abstractmethod
    def stem(self) -> str:
        """What it does, in a word or two."""

    @property
    @abstractmethod
    def problem(self) -> str:
        """The sizes and types of its problem, for messages."""

    @abstractmethod
    def assembled(self) -> Kernel:
        """Return the code, which problems that differ in sizes alone may share."""

    @abstractmethod
    def work(self, threads: int) -> StandaloneWork:
        """Return it with places for its tensors.

        Parameters
        ----------
        threads : int
            How many there will be, at most.
        """

    @property
    def impl(self) -> str:
        """What it is called in plans and reports."""
        return f"{self.stem}:{isa().name}"

    @property
    def repro(self) -> str:
        """What it is called where oneDNN has a command line that reproduces."""
        return f"fmtprop.jit kernel {self.impl} on {self.problem}"

    @property
    def scratchpad_nbytes(self) -> int:
        """Bytes of the plan's that it needs to work: none, each work has its own."""
        return 0

    @cached_property
    def kernel(self) -> Kernel:
        """The code."""
        return self.assembled()

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides its results and its speed."""
        return self.kernel.fingerprint


class Pointer:
    """Where a work finds a tensor.

    Parameters
    ----------
    arguments : ctypes.Structure
        The work's.
    field : str
        Which of them.
    """

    __slots__ = ("_arguments", "_field")

    def __init__(self, arguments: ctypes.Structure, field: str) -> None:
        self._arguments, self._field = arguments, field

    def set_data_handle(self, pointer: int) -> None:
        """Point it at other numbers."""
        setattr(self._arguments, self._field, pointer)


class StandaloneWork:
    """A kernel with its tensors, for one thread of Python at a time.

    Parameters
    ----------
    kernel : Kernel
        What to run.
    arguments : ctypes.Structure
        What it finds its work by.
    fields : mapping of str to str
        Operand or result -> the argument that points to it.
    threads : int
        How many run it.
    keep : object, optional
        What the arguments point to otherwise.
    """

    def __init__(
        self,
        kernel: Kernel,
        arguments: ctypes.Structure,
        fields: Mapping[str, str],
        threads: int,
        keep: object = None,
    ) -> None:
        self._arguments, self._keep = arguments, keep
        #: where it finds its operands and the result, by their names in oneDNN
        self.pointers: Mapping[str, Pointer] = {name: Pointer(arguments, field) for name, field in fields.items()}
        #: what to call, and with what
        self.call: Call = (
            *(runtime_function("GOMP_parallel"), c_void_p(kernel.address), c_void_p(ctypes.addressof(arguments))),
            *(c_uint(threads), c_uint(0)),
        )

    def run(self) -> None:
        """Compute."""
        function, *arguments = self.call
        function(*arguments)


def threads_for(nbytes: int, threads: int) -> int:
    """Return by how many threads so many bytes are best worked on."""
    return 1 if nbytes <= ALONE_NBYTES else threads


def address_of(name: str) -> int | None:
    """Return where a function of the OpenMP runtime lies."""
    return ctypes.cast(runtime_function(name), c_void_p).value
