"""Products of groups of rows with matrices of codes, by kernels of our own: only a run knows how many rows a group has.

A group of a few rows is multiplied by the codes; the matrix of a larger one is decoded in front of PyTorch's product,
into memory for one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fmtprop.ir import Node
from fmtprop.jit import DecodeKernel, NBitsKernel, StandaloneWork, offered
from fmtprop.ops.grouped_matmul import groups_of
from fmtprop.ops.grouped_nbits import GroupedNBits
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.bound import SCRATCHPAD, Bound, OwnStream, Place
from fmtprop.targets.executable import Executable, Implementation, Provider
from fmtprop.targets.kernel import JIT

#: operands of a group's matrix
_LEARNED = ("weights", "scales", "zero_points")


def experts_candidates(node: Node, request: Request) -> Iterator[Candidate]:
    """Yield the way to run products of groups on row-major tensors, if this machine has kernels of their sizes."""
    attrs = node.attrs
    if not isinstance(attrs, GroupedNBits) or node.post_ops:
        return
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    src, dst = formats["src"], formats["dst"]
    if any(desc.at_start() != plain(desc) for desc in formats.values()) or 0 in (*src.dims, *dst.dims):
        return
    few = NBitsKernel(
        *(dst.dims[1], src.dims[1], attrs.bits, attrs.group, src.dtype, dst.dtype, "zero_points" in formats),
        row_steps=(("src", src.dims[1]), ("dst", dst.dims[1])),
        is_exact=node.exact,
    )
    decoding = DecodeKernel(few.outputs, few.depth, few.bits, few.group, src.dtype, few.has_zero_points)
    if few.is_offered and decoding.is_offered:
        operands = {name: formats[name] for name in request if name != "dst"}
        handle = ExpertsImplementation(few, decoding, src.dims[0])
        yield Candidate(JIT, f"experts_{few.impl}", operands, (dst,), handle=handle)


@dataclass(frozen=True, eq=False)
class ExpertsImplementation(Implementation):
    """The kernels of products of groups of rows."""

    #: the product of a group of one row
    few: NBitsKernel
    #: the decoding of a group's matrix
    decoding: DecodeKernel
    #: rows of all groups
    rows: int

    #: makes the target that offers kernels, which sets this
    offered_by: ClassVar[Callable[[], Provider]]

    @property
    def identity(self) -> Mapping[str, str]:  # type: ignore[override]  # the same, computed
        """The kernels' code."""
        return {"few": self.few.fingerprint, "decoding": self.decoding.fingerprint}

    @property
    def scratchpad_nbytes(self) -> int:
        """Bytes of a decoded matrix, if a group may have many rows."""
        is_few = replace(self.few, rows=self.rows).is_offered
        return 0 if is_few else self.decoding.outputs * self.decoding.depth * self.decoding.dst.nbytes

    @property
    def repro(self) -> str:
        """Names and sizes of the kernels."""
        return f"{self.few.repro}, of the rows of a group, or {self.decoding.repro} in front of torch.mm"

    def target(self) -> Provider:
        """Return a target that offers kernels."""
        return type(self).offered_by()

    def build(self, threads: int) -> Executable:
        """Return the kernels for a number of threads."""
        return _Experts(self, threads)


class _Experts(Executable):
    def __init__(self, way: ExpertsImplementation, threads: int) -> None:
        self._way, self._threads = way, threads

    def bind(self, node: Node, places: Mapping[str, Place], stream: OwnStream) -> Bound:
        return Bound(python=(node, [_Products(self._way, self._threads, places)]))


class _Products:
    """The products of a run."""

    def __init__(self, way: ExpertsImplementation, threads: int, places: Mapping[str, Place]) -> None:
        self._way, self._threads, self._places = way, threads, places
        self._decode = way.decoding.work(threads)
        #: the kernels of as many rows as groups had so far; None where a matrix is decoded
        self._works: dict[int, StandaloneWork | None] = {}

    def __call__(self) -> None:
        """Multiply the rows of each group."""
        tensors = {name: place.tensor() for name, place in self._places.items()}
        src, dst, outputs = tensors["src"], tensors["dst"], self._way.few.outputs
        end = 0
        for group, rows in groups_of(tensors["ends"], src.shape[0]):
            end = rows.stop
            own = slice(group * outputs, (group + 1) * outputs)
            parts = {name: tensors[name][own] for name in _LEARNED if name in tensors}
            few = self._of_few(rows.stop - rows.start)
            if few is not None:
                _run(few, {**parts, "src": src[rows], "dst": dst[rows]})
                continue
            matrix = tensors[SCRATCHPAD].view(src.dtype)[: outputs * src.shape[1]].view(outputs, -1)
            _run(self._decode, {**parts, "dst": matrix})
            torch.mm(src[rows], matrix.t(), out=dst[rows])
        dst[end:] = 0

    def _of_few(self, rows: int) -> StandaloneWork | None:
        if rows not in self._works:
            kernel = offered(replace(self._way.few, rows=rows))
            self._works[rows] = None if kernel is None else kernel.work(self._threads)
        return self._works[rows]


def _run(work: StandaloneWork, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        work.point[name](tensor.data_ptr())
    work.run()
