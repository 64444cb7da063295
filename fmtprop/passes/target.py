"""The protocol between passes and targets: the formats in which a node can run, and the cost of a reorder.

Passes know only this protocol, never a library, so tests can use a table-driven target with the same results on every
CPU. :mod:`fmtprop.targets` implements it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

from fmtprop.ir import OPSET, Category, Choice, Node, Role, TensorType, opdef, ports, result_names, sources
from fmtprop.layout import DataType, FormatKind, MemoryDesc
from fmtprop.passes.assignment.formats import like, usual


@dataclass(frozen=True)
class Candidate:
    """One way to run a node."""

    target: str
    impl: str
    operands: Mapping[str, MemoryDesc]
    results: tuple[MemoryDesc, ...]
    #: estimated or measured seconds
    cost: float = 0.0
    #: whether it is the library's slow reference loop, which is never planned if another implementation exists
    is_ref: bool = False
    #: the target's object, which builds the executable (:class:`fmtprop.targets.executable.Implementation`)
    handle: Any = None

    @property
    def is_followed(self) -> bool:
        """Whether a kernel applies the node's last post-op afterwards, to the finished result."""
        return getattr(self.handle, "after", None) is not None

    def choice(self, reason: str) -> Choice:
        """Return the choice of this candidate."""
        return Choice(self.target, self.impl, self.operands, reason, self.cost, self.handle)


def candidate_of(node: Node) -> Candidate:
    """Return the candidate that was chosen for a formatted node; an empty one where there is no choice."""
    choice = node.choice
    if choice is None:
        return Candidate("", "", {}, node.descs)
    return Candidate(choice.target, choice.impl, choice.operands, node.descs, choice.cost, False, choice.handle)


def of_name(candidates: Iterable[Candidate], choice: Choice) -> Iterator[Candidate]:
    """Return the candidates that have a choice's target and implementation."""
    return (one for one in candidates if (one.target, one.impl) == (choice.target, choice.impl))


#: operand and result names -> a concrete descriptor, or MemoryDesc.any if the target may choose
Request = Mapping[str, MemoryDesc]


class Target(Protocol):
    """A target, as seen by passes."""

    @property
    def name(self) -> str:
        """Name in choices and reports."""

    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        """Yield every implementation that serves a request, in the library's order of preference.

        `request`: for each operand (``post_op_k`` included) and each result, by name: a concrete format or `any`.
        """

    def named(self, node: Node, request: Request, choice: Choice) -> Iterable[Candidate]:
        """Yield the candidates that have a choice's target and implementation."""

    def reorder_cost(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return the estimated seconds of a reorder, 0 for equal formats, None if no reorder exists."""

    def formats(self, dims: tuple[int, ...], dtype: DataType) -> Sequence[MemoryDesc]:
        """Return the formats to try for a tensor, the most likely first, always including row-major."""


@dataclass(frozen=True)
class Setting:
    """The targets of a graph, and the decisions before the choice of formats."""

    target: Target
    #: runs the nodes that the target cannot run; it accepts any op on strided formats
    fallback: Target
    #: format of graph inputs and outputs by node name. Default: row-major.
    boundary: Mapping[str, MemoryDesc] = field(default_factory=dict)
    #: whether plans can place the sources of a concat inside its result
    in_place: bool = True
    #: whether the fallback may also run nodes that the target can run
    competing: bool = True
    #: whether several nodes may run in place of one
    expanding: bool = True
    #: whether the target computes with bytes that stand for real numbers
    in_bytes: bool = False

    def allows_bytes(self, node: Node) -> bool:
        """Return whether a node may read and write bytes of grids."""
        return self.in_bytes and bool(node.grids)


def is_named(node: Node, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns, as in file names, is of a node's name or origin."""
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in (node.name, node.origin))


def can_be_read(desc: MemoryDesc, *targets: Target) -> bool:
    """Return whether a tensor in a format can be copied to row-major, which some slices of blocks cannot.

    A slice of one row, such as 4 of 16 channels, is dense, but oneDNN has no reorder for all of its strides.
    """
    if desc.is_plain or desc.is_packed or desc.tag is not None or desc.kind is not FormatKind.BLOCKED:
        return True
    row_major = MemoryDesc(desc.dims, desc.dtype)
    copy = Node("copy", "reorder", opdef("reorder").attrs(), (TensorType(desc.dims, desc.dtype),))
    return any(True for target in targets for _ in target.candidates(copy, {"src": desc, "dst": row_major}))


#: a deconvolution that runs as the gradient of a convolution has a name of this and of the convolution
AS_GRADIENT = "conv:any+"

#: a convolution of images whose rows and columns are exchanged has a name of this and of the implementation
EXCHANGED = "exchanged"


def equivalent_of(impl: str) -> str:
    """Return which primitive's implementation runs in place of an op's own; an empty name for the op's own.

    >>> equivalent_of("matmul:brgemm:avx2"), equivalent_of("exchanged:jit:avx2"), equivalent_of("jit:avx2")
    ('matmul', 'exchanged', '')
    """
    name = impl.partition(":")[0]
    return name if name in OPSET or name == EXCHANGED else ""


def is_loop(impl: str) -> bool:
    """Return whether an implementation is a reference loop; a fused depthwise pair has the name, but runs kernels.

    >>> is_loop("ref:any"), is_loop("ref_fused_convolution:any:jit_1x1:avx2:jit_dw:avx2"), is_loop("jit:avx2")
    (True, False, False)
    """
    return "ref:" in impl.removeprefix("ref_fused_convolution")


def is_optimized(target: Target, node: Node, types: Mapping[str, TensorType]) -> bool:
    """Return whether a target has optimized code for a node in one of the formats to try."""
    return any(
        not candidate.is_ref for request in all_requests(node, types) for candidate in target.candidates(node, request)
    )


def free_results(node: Node) -> dict[str, MemoryDesc]:
    """Return the request that leaves the formats of a node's results to the target."""
    return {n: MemoryDesc.any(t.dims, t.dtype) for n, t in zip(result_names(node), node.results, strict=True)}


def free_request(node: Node, types: Mapping[str, TensorType]) -> dict[str, MemoryDesc]:
    """Return the request that leaves everything to the target; vectors of parameters have only one format."""
    request = {name: MemoryDesc.any(type_.dims, type_.dtype) for name, type_ in types.items()}
    for one in ports(node, types):
        if one.role is Role.PARAMETER and types[one.name].ndim < 2:
            request[one.name] = MemoryDesc(types[one.name].dims, types[one.name].dtype)
    return {**request, **free_results(node)}


def all_requests(node: Node, types: Mapping[str, TensorType]) -> Iterator[Request]:
    """Yield a request that leaves everything to the target, then requests with all sources in one format."""
    free, read = free_request(node, types), sources(node, types)
    widest = max(read, key=lambda name: types[name].size)
    if opdef(node.op).category is Category.COMPUTE:
        yield free
    for desc in usual(MemoryDesc(types[widest].dims, types[widest].dtype)):
        chosen = {name: like(free[name], desc) or MemoryDesc(types[name].dims, types[name].dtype) for name in read}
        yield {**free, **chosen}


class Costs(Protocol):
    """Costs of candidates and reorders in seconds, as seen by passes."""

    def prepare(
        self, work: Sequence[tuple[Node, Candidate]], reorders: Sequence[tuple[MemoryDesc, MemoryDesc]]
    ) -> None:
        """Prepare the costs of these: measure within the budget, if requested."""

    def node(self, node: Node, candidate: Candidate) -> float:
        """Return the seconds of a way to run a node."""

    def reorder(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return the seconds of a reorder, 0 for equal formats, None if no reorder exists."""


class CostModel(Costs, Protocol):
    """A model of costs: nothing is measured."""

    def reorder_kind(self, src: MemoryDesc, dst: MemoryDesc) -> str:
        """Return the name of similar reorders: their measured and modelled seconds have about the same ratio."""

    def bounds(self, what: Node | MemoryDesc, how: Candidate | MemoryDesc, expected: float) -> tuple[float, float]:
        """Return the least and the most seconds that this machine can need.

        `expected`: its modelled seconds.
        """
