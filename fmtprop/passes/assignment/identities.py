"""Identities of the numbers of a graph's values: equal ones of two graphs are the same numbers, in any format.

What a constant's identity is, its owner knows. Formats change no numbers, and conversions round them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

from fmtprop.ir import Graph, Grid, Node, Value
from fmtprop.ir.deferred import Deferred
from fmtprop.layout import DataType, MemoryDesc

#: types of which all numbers are f32 numbers, too
HALVES = frozenset({DataType.BF16, DataType.F16})


class Rounded(NamedTuple):
    """The identity of numbers that were converted to other data types, one after the other."""

    numbers: Hashable
    types: tuple[Hashable, ...]


class Forms(Protocol):
    """The packed constants of a model's plans, as seen by passes."""

    def numbers(self, data: Any) -> Hashable | None:
        """Return the identity of a constant's numbers; None where it has none."""

    def computed(self, function: Hashable) -> Hashable | None:
        """Return the identity of the result of an op on identified numbers."""

    def packed(self, numbers: Hashable, desc: MemoryDesc) -> Deferred | None:
        """Return numbers that a plan has in a format; None where no plan has them so."""


class Identities:
    """The identities of a graph's values, each found once.

    `constant`: from a constant's data to its identity, None where it has none. `computed`: from an op on identified
    numbers to the identity of its result.
    """

    def __init__(
        self,
        graph: Graph,
        constant: Callable[[Any], Hashable | None],
        computed: Callable[[Hashable], Hashable | None] = lambda function: function,
    ) -> None:
        self._graph, self._constant, self._computed = graph, constant, computed
        self._found: dict[Value, Hashable | None] = {}

    def of(self, value: Value) -> Hashable | None:
        """Return the identity of a value's numbers; None where anything that they depend on has none."""
        if value not in self._found:
            self._found[value] = self._identified(self._graph.node(value.node), value)
        return self._found[value]

    def _identified(self, node: Node, value: Value) -> Hashable | None:
        if node.op == "constant":
            # a plan from a file has no constants: all forms are known
            return self._constant(self._graph.constants.get(node.name))
        inputs = self._graph.inputs(node.name)
        if not inputs or node.is_boundary:
            return None
        operands = [(name, self.of(source)) for name, source in inputs.items()]
        if any(numbers is None for _, numbers in operands):
            return None
        types = tuple(self._graph.type_of(source).dtype for source in inputs.values())
        if node.op == "reorder":
            return rounded(operands[0][1], types[0], node.results[0].dtype, node.grids.get("dst"))
        tail = tuple((one.op, one.attrs, one.operand) for one in node.post_ops)
        return self._computed((node.op, node.attrs, tail, node.exact, node.results, value.index, types, *operands))


def rounded(numbers: Hashable, have: DataType, wanted: DataType, grid: Grid | None = None) -> Hashable:
    """Return the identity of numbers in another data type; bytes stand for numbers of a grid."""
    if wanted is have or (wanted is DataType.F32 and have in HALVES):
        return numbers
    base, types = numbers if isinstance(numbers, Rounded) else (numbers, ())
    are_reals = have.is_floating and wanted.is_floating
    last = wanted if grid is None or are_reals else (wanted, grid)
    return numbers if types[-1:] == (last,) else Rounded(base, (*types, last))
