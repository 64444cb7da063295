"""The pieces of a graph: attributes, post-ops, recorded choices, nodes and values.

All are immutable: a pass replaces a node, but never edits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from fmtprop.errors import GraphError
from fmtprop.ir.grid import Grid
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.system.printable import printable, shortened

#: most characters of a name in a message
_SHOWN_CHARACTERS = 200

#: of a node without quantized numbers
NO_GRIDS: Mapping[str, Grid] = {}

A = TypeVar("A", bound="Attrs")


@dataclass(frozen=True)
class Attrs:
    """Base of every op's attributes: a frozen dataclass of ints, floats, strings, bools and tuples of these.

    Subclasses validate themselves in ``__post_init__`` and raise :class:`~fmtprop.errors.ShapeError`.
    """

    #: whether the op runs in each run even if all operands are constants: to keep its result would cost the memory that
    #: its operands save
    each_run: ClassVar[bool] = False

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as plain JSON data."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls: type[A], data: Mapping[str, Any]) -> A:
        """Build the attributes from the data of :meth:`to_json`."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise GraphError(f"{cls.__name__} has no attribute {unknown[0]!r}; it has {sorted(known)}")
        for one in fields(cls):
            if one.name not in data and one.default is MISSING and one.default_factory is MISSING:
                raise GraphError(f"attribute {one.name!r} is missing; {cls.__name__} has {sorted(known)}")
        try:
            return cls(**{name: _frozen(value) for name, value in data.items()})
        except TypeError as error:
            raise GraphError(f"{cls.__name__}: {error}") from error


@dataclass(frozen=True)
class Into(Attrs):
    """Attributes of an output that is the new content of an input's tensor."""

    #: name of the input; a step that changes a part of its numbers may do so in the caller's tensor
    into: str


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return value


@dataclass(frozen=True, order=True, slots=True)
class Value:
    """One result of one node; an edge of the graph carries it."""

    node: str
    #: index of the producer's result
    index: int = 0

    def __str__(self) -> str:
        return self.node if self.index == 0 else f"{self.node}:{self.index}"


@dataclass(frozen=True)
class PostOp:
    """An operation that a primitive applies to its result before storing it."""

    #: ``"eltwise"``, ``"binary"``, ``"prelu"``, ``"sum"`` or ``"convolution"``. Sum reads the residual from the
    #: destination's buffer, so its operand is overwritten. A convolution is depthwise, and may change the dims.
    op: str
    attrs: Attrs
    #: name of the node's extra input (``"post_op_0"``…), which all but eltwise have; a convolution's weights
    operand: str | None = None
    origin: str = ""
    #: name of a convolution's second extra input (``"post_op_0_bias"``…)
    bias: str | None = None

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of all its extra inputs, in the order of its op's declaration."""
        return tuple(name for name in (self.operand, self.bias) if name is not None)


def post_op_operand(index: int, part: str = "") -> str:
    """Return the name of an operand of a node's post-op; ``part`` is empty for the first operand.

    >>> post_op_operand(0), post_op_operand(2, "bias")
    ('post_op_0', 'post_op_2_bias')
    """
    return f"post_op_{index}_{part}" if part else f"post_op_{index}"


@dataclass(frozen=True)
class Choice:
    """The decision on how a node runs: made by the format assignment, read by reports."""

    #: the target: ``"onednn"``, ``"jit"``, ``"reference"``, …
    target: str
    #: name of the implementation, such as ``"jit:avx512_core"``
    impl: str
    #: format of each operand as the node reads it
    operands: Mapping[str, MemoryDesc]
    #: the rule that decided, in one sentence
    reason: str = ""
    #: estimated or measured seconds
    cost: float = 0.0
    #: the target's object, which builds the executable (:class:`fmtprop.targets.executable.Implementation`)
    handle: Any = None


@dataclass(frozen=True)
class Node:
    """One op of a graph."""

    #: ops without computation: the graph's inputs, outputs and data
    BOUNDARY: ClassVar[frozenset[str]] = frozenset({"input", "constant", "output"})

    name: str
    #: name of the op's declaration in :mod:`fmtprop.ops`
    op: str
    attrs: Attrs
    results: tuple[TensorType, ...]
    #: fused post-ops, in the order of application
    post_ops: tuple[PostOp, ...] = ()
    #: format of each result; empty until formats are assigned
    descs: tuple[MemoryDesc, ...] = ()
    #: the decision on how the node runs; ``None`` until formats are assigned
    choice: Choice | None = None
    #: origin in the user's model, such as ``"layer1.0.conv1"``
    origin: str = ""
    #: whether NaN and infinities in its results must be PyTorch's; implementations that lose some must not run it
    exact: bool = False
    #: phase of an input or an output: ``"backward"`` if it belongs to the second entry point of a graph with two
    phase: str = ""
    #: operands and results, by name, of which all numbers lie on a grid: they may be bytes. (A fact about the graph,
    #: found by :class:`~fmtprop.passes.precision.mark_grids.MarkGrids`; a constant's is given.)
    grids: Mapping[str, Grid] = field(default_factory=lambda: NO_GRIDS, compare=False)
    #: types of operands with which its results agree, if that is known: a node never changes, so it stays true
    agreed: Mapping[str, TensorType] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def residual(self) -> str | None:
        """Name of the operand that a sum post-op adds, which lies in the result's own buffer; None without a sum."""
        return next((post_op.operand for post_op in self.post_ops if post_op.op == "sum"), None)

    @property
    def grid_forms(self) -> tuple[tuple[str, object], ...]:
        """What implementations depend on of the numbers for which its bytes stand (:attr:`Grid.form`)."""
        return tuple((name, grid.form) for name, grid in self.grids.items())

    @property
    def tail(self) -> frozenset[str]:
        """Names of the operands that post-ops read."""
        return frozenset(name for post_op in self.post_ops for name in post_op.operands)

    @property
    def is_boundary(self) -> bool:
        """Whether the node is an input, a constant or an output of the graph."""
        return self.op in self.BOUNDARY

    @property
    def label(self) -> str:
        """Name and op in messages: ``node conv_3 (convolution)``."""
        return label_of(self.name, self.op)

    def with_(self, **changes: Any) -> Node:
        """Return a copy with some fields replaced."""
        if not changes.keys() <= _FIELDS:
            raise TypeError(f"a node has no {', '.join(sorted(changes.keys() - _FIELDS))}")
        made = object.__new__(Node)
        made.__dict__.update(self.__dict__, **changes)  # dataclasses.replace takes three times as long
        return made if changes.keys().isdisjoint(_TYPED) else made.agreeing_with(None)

    def agreeing_with(self, types: Mapping[str, TensorType] | None) -> Node:
        """Return this node, of which the results were inferred from operands of these types."""
        object.__setattr__(self, "agreed", types)
        return self


#: fields of a node that can be replaced, and those that its results depend on
_FIELDS = {one.name for one in fields(Node) if one.init}
_TYPED = {"op", "attrs", "results", "post_ops", "grids"}


def label_of(name: str, op: str) -> str:
    """Return the label of a node with this name and op, which may come from an untrusted file."""
    return printable(f"node {shortened(name, _SHOWN_CHARACTERS)} ({shortened(op, _SHOWN_CHARACTERS)})")
