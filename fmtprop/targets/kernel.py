"""A kernel of our own as a target's implementation of a node: its identity, and its binding to a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fmtprop.ir.node import Node
from fmtprop.ir.op import opdef
from fmtprop.jit import ByteProductsKernel, StandaloneKernel
from fmtprop.ops.embedding_bag import DISORDERED, OUTSIDE
from fmtprop.targets.bound import Bound, OwnStream, Place, failed
from fmtprop.targets.executable import Executable, Implementation, Provider
from fmtprop.targets.scaling import scaling_of, stored_of

#: who executes, in choices and reports
JIT = "jit"

#: errors of the statuses of a kernel's check, from 1 on
_REFUSALS = (IndexError(OUTSIDE), RuntimeError(DISORDERED))


@dataclass(frozen=True, eq=False)
class KernelImplementation(Implementation):
    """A kernel of the project as the implementation of a node."""

    kernel: StandaloneKernel

    by_kernel = True

    #: makes the target that offers kernels, which sets this
    offered_by: ClassVar[Callable[[], Provider]]

    @property
    def overwrites(self) -> bool:  # type: ignore[override]  # the same, computed
        """Whether its result may take the place of an operand."""
        return self.kernel.overwrites

    @property
    def takes_any_numbers(self) -> bool:  # type: ignore[override]  # the same, computed
        """Whether it accepts any numbers."""
        return self.kernel.takes_any_numbers

    @property
    def moves_freely(self) -> bool:  # type: ignore[override]  # the same, computed
        """Whether it moves each byte once."""
        return self.kernel.moves_freely

    @property
    def identity(self) -> Mapping[str, str]:  # type: ignore[override]  # the same, computed
        """The kernel's code."""
        return {"kernel": self.kernel.fingerprint}

    @property
    def repro(self) -> str:
        """Name and constants of the kernel."""
        return self.kernel.repro

    def may_change(self, node: Node) -> str | None:
        """Return the operand that the kernel can change."""
        return opdef(node.op).pytorch.changed(node.attrs) if self.kernel.changes else None

    def target(self) -> Provider:
        """Return a target that offers kernels."""
        return type(self).offered_by()

    def build(self, threads: int) -> Executable:
        """Return the kernel for a number of threads."""
        return _KernelExecutable(self.kernel, threads)


class _KernelExecutable(Executable):
    def __init__(self, kernel: StandaloneKernel, threads: int) -> None:
        self._kernel, self._threads = kernel, threads

    def bind(self, node: Node, places: Mapping[str, Place], stream: OwnStream) -> Bound:
        work = self._kernel.work(self._threads)
        for name, place in places.items():
            place.memory.follow(work.point[name], place.desc.offset0 * place.desc.dtype.nbytes)
        keep: list[object] = [work]
        if isinstance(self._kernel, ByteProductsKernel):  # layers that differ in the scales of weights share it
            keep.append(self._kernel.scale(work, scaling_of(node, stored_of(node)).scales["weights"]))
        refusals = [failed(node, JIT, error) for error in _REFUSALS]
        return Bound(work.calls, keep=keep, failure=lambda status: refusals[status - 1])
