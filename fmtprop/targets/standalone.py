"""Kernels of our own that compute a whole node, as implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fmtprop.ir.node import Node
from fmtprop.jit import StandaloneKernel
from fmtprop.targets.executable import Bound, Executable, Implementation, Place, Provider, Stream

__all__ = ["KernelImplementation"]


@dataclass(frozen=True, eq=False)
class KernelImplementation(Implementation):
    """What a kernel computes.

    Parameters
    ----------
    kernel : StandaloneKernel
        What to run.
    """

    kernel: StandaloneKernel

    moves_freely = True
    takes_any_numbers = True
    overwrites = True

    @property
    def identity(self) -> Mapping[str, str]:  # type: ignore[override]  # the same, computed
        """The kernel's code."""
        return {"kernel": self.kernel.fingerprint}

    @property
    def repro(self) -> str:
        """What it is called."""
        return self.kernel.repro

    def target(self) -> Provider:
        """Return a target that offers kernels."""
        from fmtprop.targets.onednn import OneDnnTarget  # which asks for these

        return OneDnnTarget()

    def build(self, threads: int) -> Executable:
        """Return the kernel for so many threads."""
        return _Executable(self.kernel, threads)


class _Executable(Executable):
    def __init__(self, kernel: StandaloneKernel, threads: int) -> None:
        self._kernel, self._threads = kernel, threads

    def bind(self, node: Node, places: Mapping[str, Place], stream: Stream) -> Bound:
        work = self._kernel.work(self._threads)
        for name, pointer in work.pointers.items():
            desc = places[name].desc
            places[name].memory.follow(pointer.set_data_handle, desc.offset0 * desc.dtype.nbytes)
        return Bound([work.call], keep=[work])
