"""DirectML's DML_SLICE1 in a graph: validated by its documented rules, then an ordinary slice (SPEC S1-S4)."""

from __future__ import annotations

from fmtprop.dialects.slice1 import FeatureLevel, Slice1
from fmtprop.errors import ShapeError
from fmtprop.ir import Graph, Value
from fmtprop.ops.building import emit
from fmtprop.ops.view_attrs import Slice


def slice1(
    graph: Graph,
    src: Value,
    operator: Slice1,
    *,
    feature_level: FeatureLevel | str = FeatureLevel.LEVEL_4_1,
    name: str | None = None,
) -> Value:
    """Add a DML_SLICE1 to a graph.

    `feature_level`: level of the allowed ranks and data types: ``"2.1"``, ``"3.0"`` or ``"4.1"``.

    >>> from fmtprop.ir import Graph, TensorType
    >>> g = Graph("s3")
    >>> x = g.input("x", TensorType((1, 1, 4, 4)))
    >>> y = slice1(g, x, Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, -2, 2)))
    >>> g.node(y.node).attrs
    Slice(starts=(0, 0, 3, 1), sizes=(1, 1, 2, 2), steps=(1, 1, -2, 2))

    ``DML_SLICE1_OPERATOR_DESC`` (directml.h); SPEC S1-S4.
    """
    type_ = graph.type_of(src)
    try:
        operator.check(type_.dims, type_.dtype, feature_level=feature_level)
    except ShapeError as error:
        raise ShapeError(f"DML_SLICE1 of {src}: {error}") from error
    return emit(graph, "slice", {"src": src}, Slice(operator.start, operator.output_sizes, operator.strides), name=name)
