"""Helpers that every op family shares: adding a node with inferred types, reading formats off a primitive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fmtprop.errors import GraphError, ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Attrs, Node, Value
from fmtprop.ir.op import Lowering, opdef
from fmtprop.ir.types import TensorType

if TYPE_CHECKING:
    from fmtprop.dnnl import PrimitiveDesc
    from fmtprop.layout import MemoryDesc


def emit(
    graph: Graph,
    op: str,
    inputs: Mapping[str, Value | None],
    attrs: Attrs,
    *,
    name: str | None = None,
    origin: str = "",
) -> Value:
    """Add a node, infer its result types and return its first result.

    Parameters
    ----------
    graph : Graph
        Where to add it.
    op : str
        Name of the op.
    inputs : mapping of str to Value or None
        Operands by name; None for an absent optional one.
    attrs : Attrs
        The op's attributes.
    name : str, optional
        Node name; by default the op's short name and a number.
    origin : str
        Where it comes from in the user's model.

    Raises
    ------
    ShapeError
        Operand types do not fit; the message names node, operand and axis.
    GraphError
        Unknown op, operand or attribute class.
    """
    declaration = opdef(op)
    present = {operand: value for operand, value in inputs.items() if value is not None}
    if name is None:
        name = graph.fresh_name(getattr(attrs, "alg", "") if op == "eltwise" else declaration.short)
    if not isinstance(attrs, declaration.attrs):
        raise GraphError(f"node {name} ({op}): attrs must be {declaration.attrs.__name__}, got {type(attrs).__name__}")
    try:
        declaration.check_operands(present)
        results = declaration.infer(attrs, {operand: graph.type_of(value) for operand, value in present.items()})
    except ShapeError as error:
        raise ShapeError(f"node {name} ({op}){f' from {origin}' if origin else ''}: {error}") from error
    return graph.add(Node(name, op, attrs, results, origin=origin), present)[0]


def lowering(pd: PrimitiveDesc, queries: Mapping[str, str]) -> Lowering:
    """Return a lowering whose formats are plain queries of the primitive descriptor.

    Parameters
    ----------
    pd : PrimitiveDesc
        What oneDNN answered.
    queries : mapping of str to str
        Operand or result name -> query name (``"src"``, ``"weights"``, ``"src_1"``, …).
    """

    def resolve(candidate: PrimitiveDesc) -> Mapping[str, MemoryDesc]:
        found = {}
        for operand, query in queries.items():
            native = candidate.query_md(query)
            if native is not None:
                found[operand] = native.desc
        return found

    return Lowering(pd, resolve)


def only(types: Mapping[str, TensorType], *names: str) -> tuple[TensorType, ...]:
    """Return the types of these operands, in this order."""
    return tuple(types[name] for name in names)
