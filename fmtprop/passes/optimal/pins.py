"""The caller's formats as constraints: ``{"conv_3.dst": "nChw16c"}``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from fmtprop.errors import FmtpropError, OptionError
from fmtprop.ir import Graph, TensorType, Value, result_names
from fmtprop.layout import MemoryDesc


def resolve_pins(graph: Graph, pins: Mapping[str, MemoryDesc | str]) -> dict[str, MemoryDesc]:
    """Return the descriptor of each pin.

    `pins`: ``"node.operand"`` or ``"node.dst"`` -> a descriptor, or a format tag. Raises OptionError if there is
    no such node or operand, or the format does not fit it.
    """
    return {name: _resolve(graph, name, pin) for name, pin in pins.items()}


def _resolve(graph: Graph, name: str, pin: MemoryDesc | str) -> MemoryDesc:
    type_ = _type_of(graph, name)
    if isinstance(pin, str):
        try:
            return MemoryDesc(type_.dims, type_.dtype, tag=pin)
        except FmtpropError as error:
            raise OptionError(f"pin {name!r}: {pin!r} is not a format of {type_}: {error}") from error
    if not isinstance(pin, MemoryDesc):
        raise OptionError(f"pin {name!r} must be a MemoryDesc or a format tag, got {type(pin).__name__}")
    if pin.kind == "any":
        raise OptionError(f"pin {name!r} must be one format, not any; leave the pin out to let it be chosen")
    if (pin.dims, pin.dtype) != (type_.dims, type_.dtype):
        raise OptionError(f"pin {name!r} is {pin}, but that tensor is {type_}: dims and data type must be its own")
    return pin


def _type_of(graph: Graph, name: str) -> TensorType:
    node_name, _, port = name.rpartition(".")
    if node_name not in graph:
        known = [node.name for node in graph.nodes() if not node.is_boundary]
        near = get_close_matches(node_name or name, known, n=3) or known[:3]
        raise OptionError(
            f'pin {name!r} names no node of {graph.name} (write "node.operand" or "node.dst"; nodes fused into others '
            f"are gone); near it: {', '.join(near)}"
        )
    node = graph.node(node_name)
    if node.is_boundary:
        raise OptionError(f"pin {name!r}: {node.label} is no computation; give its format as boundary[{node_name!r}]")
    inputs = graph.inputs(node_name)
    results = result_names(node)
    if port in results:
        return graph.type_of(Value(node_name, results.index(port)))
    if port not in inputs:
        raise OptionError(f"pin {name!r}: {node.label} has no {port!r}; it has {', '.join((*inputs, *results))}")
    return graph.type_of(inputs[port])
