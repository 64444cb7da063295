"""Kernels that compute a whole node instead of a primitive: how plans name them, and how they find their tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, partial

from fmtprop.jit.kernel import Arguments, BoundKernel, Kernel, isa

__all__ = ["StandaloneKernel", "StandaloneWork"]


class StandaloneKernel(ABC):
    """A kernel that computes a whole node; a dataclass of its sizes."""

    @property
    @abstractmethod
    def stem(self) -> str:
        """What it does, in a word or two."""

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
        return f"fmtprop.jit kernel {self.impl} of {self}"

    @cached_property
    def kernel(self) -> Kernel:
        """The code."""
        return self.assembled()

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides its results and its speed."""
        return self.kernel.fingerprint


class StandaloneWork(BoundKernel):
    """A kernel with its tensors, for one thread of Python at a time.

    Parameters
    ----------
    kernel, arguments, threads
        As of :class:`fmtprop.jit.kernel.BoundKernel`. The arguments that point to operands and the result have their
        names.
    keep : object, optional
        What the arguments point to otherwise.
    """

    def __init__(self, kernel: Kernel, arguments: Arguments, threads: int, keep: object = None) -> None:
        super().__init__(kernel, arguments, threads)
        self._keep = keep
        names = {name for name, *_ in arguments._fields_} & {"src", "src_0", "src_1", "dst"}
        #: what points it to its operands and its result, by their names in oneDNN
        self.point: Mapping[str, Callable[[int], None]] = {name: partial(setattr, arguments, name) for name in names}
