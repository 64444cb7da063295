"""The contract of an op: everything the system knows about it, declared once.

An op family lives in one file of :mod:`fmtprop.ops`; this module has the parts of a declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from fmtprop.errors import GraphError
from fmtprop.ir.exporting import Onnx
from fmtprop.ir.facets import Absorbs, ByPyTorch, Cost, Linear, Numbers, View
from fmtprop.ir.node import Attrs, Node
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PostOps, PrimitiveAttr, PrimitiveDesc
    from fmtprop.ir.importing import Importer


T = TypeVar("T")

#: a variadic operand has inputs with numbers of fewer digits
_DIGITS_LIMIT = 10
#: lists of operands that an op remembers as right
_MOST_CHECKED = 64


class Category(Enum):
    """Row of an op in the propagation table (SPEC M9), with two rows of our own."""

    #: (de)convolution, inner product, matmul, RNN: every operand `any`
    COMPUTE = "compute"
    #: pooling, normalizations, LRN, eltwise, shuffle, softmax…: src as its producer gives it, dst `any`
    BANDWIDTH = "bandwidth"
    #: binary, concat, sum, reorder: several sources as their producers give them, dst `any`
    MULTI_SRC = "multi_src"
    #: a transformation of the descriptor; no data moves where the format permits
    VIEW = "view"
    #: no oneDNN primitive: plain PyTorch on plain formats
    HOST = "host"


@dataclass(frozen=True)
class Operand:
    """One operand of an op."""

    #: oneDNN's name: ``"src"``, ``"weights"``, ``"bias"``…; a variadic operand's inputs are ``name_0``, ``name_1``…
    name: str
    #: name in :class:`fmtprop.dnnl.Arg` by which the primitive takes it, such as ``"WEIGHTS"``; empty if only the
    #: reference reads it
    arg: str
    #: whether it may be absent
    optional: bool = False
    #: whether it stands for one or more inputs
    variadic: bool = False
    #: a learned tensor (weights, bias, statistics) rather than an activation: its format is the op's own affair
    parameter: bool = False
    #: whether it stays f32 where the op computes in a narrower type: a sum over time, or a gradient
    wide: bool = False

    @property
    def is_workspace(self) -> bool:
        """Whether it is the workspace of a primitive."""
        return self.arg == "WORKSPACE"

    def index_of(self, name: str) -> int | None:
        """Return which of its inputs has a name, 0 where there is but one; None if it has none of that name."""
        if not self.variadic:
            return 0 if name == self.name else None
        stem, _, index = name.rpartition("_")
        return int(index) if stem == self.name and index.isdecimal() and len(index) < _DIGITS_LIMIT else None


@dataclass(frozen=True)
class Lowering:
    """A primitive descriptor, and functions that read the op's formats from it."""

    pd: PrimitiveDesc
    #: from a primitive descriptor (this one, or a later implementation) to the MemoryDesc of each operand and result by
    #: name, in the op's own logical dimensions; raises FormatError where they cannot express a format
    resolve: Callable[[PrimitiveDesc], Mapping[str, MemoryDesc]]
    #: from a post-op operand's MemoryDesc as the primitive sees it, and its dims in the op, to the MemoryDesc in the
    #: op's dimensions; None where the two are the same
    tail: Callable[[MemoryDesc, tuple[int, ...]], MemoryDesc] | None = None


@dataclass(frozen=True)
class Sample:
    """A small problem of an op, for the tests that hold for every op."""

    name: str
    attrs: Attrs
    types: Mapping[str, TensorType]
    #: `low`, `high`: range of the random input data, where the op needs one (logarithms, variances)
    low: float = -1.0
    high: float = 1.0


@dataclass(frozen=True)
class PostOpForm:
    """Form of an op as a post-op of another op's primitive."""

    #: oneDNN's: ``"eltwise"``, ``"binary"``, ``"sum"``, ``"prelu"`` or ``"convolution"`` (depthwise)
    kind: str
    #: ``(attrs, dnnl.PostOps, native descs of the operands after the first, data type of dst)``: appends the post-op.
    #: UnsupportedOpError where oneDNN has none for these attributes.
    append: Callable[[Any, PostOps, Sequence[NativeDesc], DataType], object]


Infer = Callable[[Any, Mapping[str, TensorType]], "tuple[TensorType, ...]"]
Reference = Callable[[Any, Mapping[str, Any]], "tuple[Any, ...]"]
#: oneDNN's descriptors of operands and results, by name
Natives: TypeAlias = "Mapping[str, NativeDesc]"
#: oneDNN's attributes of a primitive, which have its post-ops
NativeAttr: TypeAlias = "PrimitiveAttr | None"
Primitive = Callable[[Any, Natives, NativeAttr], Lowering]
Sliced = Callable[[Any, int, int], "Attrs | None"]
Parts = Callable[[Any, MemoryDesc, "Mapping[str, TensorType]"], "Mapping[str, MemoryDesc] | None"]


@dataclass(frozen=True)
class OpDef:
    """Declaration of an op."""

    #: oneDNN's primitive name, or the field's name for views
    name: str
    attrs: type[Attrs]
    operands: tuple[Operand, ...]
    category: Category
    #: ``(attrs, types by operand) -> result types``; raises ShapeError without naming the node (the caller adds it)
    infer: Infer
    #: ``(attrs, torch tensors by operand) -> result tensors``; the meaning of the op, in plain PyTorch
    reference: Reference
    #: small problems; at least one
    samples: Callable[[], Iterable[Sample]]
    #: ``(attrs, native descs by operand and result, primitive attr) -> Lowering``; pure. For inference.
    primitive: Primitive | None = None
    #: other primitives that compute the same from the same operands, each given under its own execution argument; same
    #: signature as `primitive`. UnsupportedOpError or FormatError where one does not apply.
    equivalents: tuple[Primitive, ...] = ()
    #: for an op that only describes its source anew
    view: View | None = None
    #: ``(attrs, desc of dst, types by operand) -> desc of each operand within dst``, or None if they would not be
    #: dense. For an op that only puts its sources side by side, so that no data must move.
    parts: Parts | None = None
    #: names of the results, and of their arguments; a result beyond these is ``dst_1``, ``dst_2``… by its index
    results: tuple[Operand, ...] = (Operand("dst", "DST"),)
    #: positions of the products that the op sums; None if it sums none
    linear: Linear | None = None
    #: whether each element of the result depends only on the same element of each source
    elementwise: bool = False
    #: ``(attrs, batch, images) -> attributes`` with which the op computes these images of a batch from the same images
    #: of its sources, or None if an image depends on others. Without it, the op cannot be sliced.
    sliced: Sliced | None = None
    cost: Cost = field(default_factory=Cost)
    numbers: Numbers = field(default_factory=Numbers)
    pytorch: ByPyTorch = field(default_factory=ByPyTorch)
    #: the post-ops of its primitive
    absorbs: Absorbs = field(default_factory=Absorbs)
    #: its form as a post-op of the op before it; None if it has none
    as_post_op: PostOpForm | None = None
    #: operands of which dst may take the buffer if both have the same descriptor: element-wise ops, softmax, …
    inplace: frozenset[str] = frozenset()
    #: stem of node names: ``"conv"`` for convolution
    short: str = ""
    #: ATen overload names to importers, such as ``"aten.relu.default"``
    torch: Mapping[str, Importer] = field(default_factory=dict)
    #: the op as ONNX nodes. Without it, PyTorch's exporter writes the op's `reference`.
    onnx: Onnx | None = None

    def __post_init__(self) -> None:
        if (self.view is not None) != (self.category is Category.VIEW):
            raise GraphError(f"op {self.name}: category VIEW and a view rule go together")
        # a bandwidth-limited op may have kernels of our own only
        needs, allowed = {Category.COMPUTE, Category.MULTI_SRC}, {*Category} - {Category.VIEW, Category.HOST}
        if self.category not in (allowed if self.primitive is not None else {*Category} - needs):
            raise GraphError(f"op {self.name}: category {self.category.name} and a primitive rule do not go together")
        if self.equivalents and self.primitive is None:
            raise GraphError(f"op {self.name} has equivalents of a primitive, but no primitive")
        if not self.short:
            object.__setattr__(self, "short", self.name)

    @cached_property
    def result_names(self) -> tuple[str, ...]:
        """The names of its declared results."""
        return tuple(result.name for result in self.results)

    @cached_property
    def _checked(self) -> set[tuple[str, ...]]:
        """Names of operands that were checked before: most nodes have the same."""
        return set()

    def operand(self, name: str) -> Operand:
        """Return the declaration of an operand; ``src_2`` finds the variadic ``src``."""
        for operand in self.operands:
            if operand.index_of(name) is not None:
                return operand
        raise GraphError(f"op {self.name} has no operand {name!r}; it has {[o.name for o in self.operands]}")

    def check_operands(self, names: Iterable[str]) -> None:
        """Check that the operand names fit the declaration."""
        names = tuple(names)
        if names in self._checked:
            return
        given = {self.operand(name).name for name in names}
        for operand in self.operands:
            if not operand.optional and operand.name not in given:
                raise GraphError(f"op {self.name} needs operand {operand.name!r}")
        if len(self._checked) < _MOST_CHECKED:
            self._checked.add(names)


#: every op by name; filled once, by :mod:`fmtprop.ops`
OPSET: dict[str, OpDef] = {}


def opdef(name: str) -> OpDef:
    """Return the declaration of an op."""
    try:
        return OPSET[name]
    except KeyError:
        hint = "" if OPSET else "; import fmtprop.ops first"
        raise GraphError(f"unknown op {name!r}{hint}; known: {', '.join(sorted(OPSET))}") from None


def op_of(attrs: Attrs) -> str:
    """Return the name of the op that has attributes of this class."""
    return next(name for name, declaration in OPSET.items() if declaration.attrs is type(attrs))


def linear_of(node: Node) -> Linear | None:
    """Return where the products of a node are, None if it sums none."""
    return None if node.is_boundary else opdef(node.op).linear


def loses_special_values(node: Node) -> bool:
    """Return whether oneDNN may treat NaN or infinities differently from PyTorch, in a node or its post-ops."""
    parts = [(node.op, node.attrs), *((post_op.op, post_op.attrs) for post_op in node.post_ops)]
    return any(opdef(op).numbers.loses(attrs) for op, attrs in parts)
