"""Conversion of a graph to and from a networkx ``MultiDiGraph`` of plain data, for passes that know only networkx.

Node attributes
    ``op`` name of the op; ``results`` list of ``{"dims": [...], "dtype": "f32"}``; ``attrs`` dictionary;
    ``post_ops`` list of ``{"op", "attrs", "operand", "origin", "bias"}``; ``descs`` list of MemoryDesc or None;
    ``choice`` Choice or None; ``origin`` text; ``order`` number: among the ready nodes the smallest goes first;
    ``data``, of constants only: a torch tensor or an Initialiser; ``grid``, of some constants: the data of a
    :class:`~fmtprop.ir.grid.Grid` on which all their numbers lie. Only ``op`` and ``results`` are required.
Edges
    Producer to reader; the key is the reader's operand, ``result`` the index of the producer's result (default 0),
    ``position`` the operand's place among the operands (by default as the op declares them).
Graph attributes
    ``name`` and ``structure``, as in :class:`~fmtprop.ir.graph.Graph`. Others are yours; they are not kept.

Except for :class:`~fmtprop.ir.graph.Graph` itself, only this module uses the graph inside it. networkx is imported when
it is used: its import takes 0.2 s.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fmtprop.errors import GraphError, ShapeError
from fmtprop.ir.grid import Grid
from fmtprop.ir.node import Choice, Node, PostOp, Value, label_of
from fmtprop.ir.op import opdef
from fmtprop.ir.plain import attrs_from_plain
from fmtprop.ir.ports import Role, port
from fmtprop.ir.structure_check import check_structure
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc

if TYPE_CHECKING:
    import networkx as nx

    from fmtprop.ir.graph import Graph

_NODE_KEYS = ("op", "results", "attrs", "post_ops", "descs", "choice", "origin", "order", "data", "phase", "grid")
_EDGE_KEYS = ("result", "position")
_POST_OP_KEYS = ("op", "attrs", "operand", "origin", "bias")


# ---------------------------------------------------------------- out


def to_networkx(graph: Graph) -> nx.MultiDiGraph[str]:
    """Return the graph as plain networkx data; edits of the result do not change the graph.

    >>> from fmtprop.ir import Graph
    >>> from fmtprop.ops import Eltwise, emit
    >>> g = Graph("tiny")
    >>> g.output(emit(g, "eltwise", {"src": g.input("x", TensorType((1, 8)))}, Eltwise("relu")))
    >>> nxg = to_networkx(g)
    >>> nxg.nodes["relu_1"]["attrs"]["alg"] = "tanh"
    >>> from_networkx(nxg, Graph).node("relu_1").attrs
    Eltwise(alg='tanh', alpha=0.0, beta=0.0)
    """
    import networkx as nx

    plain: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=graph.name, structure=graph.structure)
    for name, data in graph._graph.nodes.items():
        row = plain_node(data["node"])
        row["order"] = data["order"]
        if name in graph.constants:
            row["data"] = graph.constants[name]
        plain.add_node(name, **row)
    plain.add_edges_from((u, v, key, dict(data)) for u, v, key, data in graph._graph.edges())
    return plain


def plain_node(node: Node) -> dict[str, Any]:
    """Return a node's fields as plain data, without its name and its edges."""
    plain = {
        "op": node.op,
        "attrs": node.attrs.to_json(),
        "results": [{"dims": list(type_.dims), "dtype": type_.dtype.value} for type_ in node.results],
        "post_ops": [_plain_post_op(post_op) for post_op in node.post_ops],
        "descs": list(node.descs) or None,
        "choice": node.choice,
        "origin": node.origin,
    }
    if node.op == "constant" and node.grids:
        plain["grid"] = node.grids["dst"].to_json()
    return {**plain, "phase": node.phase} if node.phase else plain


def _plain_post_op(post_op: PostOp) -> dict[str, Any]:
    attrs = post_op.attrs.to_json()
    plain = {"op": post_op.op, "attrs": attrs, "operand": post_op.operand, "origin": post_op.origin}
    return plain if post_op.bias is None else {**plain, "bias": post_op.bias}


# ---------------------------------------------------------------- back


def from_networkx(nxg: nx.MultiDiGraph[str], graph_of: type[Graph]) -> Graph:
    """Build a graph from plain networkx data.

    `nxg`: the form in the module's docstring. A node without ``order`` goes right before its first reader, as with
    :meth:`Graph.insert`; inputs, outputs and nodes without readers go last, in the order of adding.
    """
    import networkx as nx

    from fmtprop.ir.verify import verify_structure

    if not isinstance(nxg, nx.MultiDiGraph):
        raise GraphError(f"a graph is built from a networkx.MultiDiGraph, got {type(nxg).__name__}")
    name, structure = nxg.graph.get("name", "graph"), nxg.graph.get("structure", "")
    if not isinstance(name, str) or not isinstance(structure, str):
        raise GraphError(f"graph attributes name and structure must be text, got {name!r} and {structure!r}")
    nodes = {key: node_of(key, data) for key, data in nxg.nodes(data=True)}
    inputs = {key: _inputs(nxg, node) for key, node in nodes.items()}
    orders = _orders(nxg, nodes)

    graph = graph_of(name, structure)
    graph.constants = {key: data["data"] for key, data in nxg.nodes(data=True) if "data" in data}
    for key, node in nodes.items():
        graph._graph.add_node(key, node=node, order=orders[key])
    for key, values in inputs.items():
        graph._connect(key, values)
    graph._is_in_order = False  # who made the data, made the order
    graph._order = math.floor(max(orders.values(), default=-1)) + 1
    verify_structure(graph)
    check_structure(structure, len(graph.input_nodes), len(graph.output_nodes))
    return graph


def node_of(name: object, data: Mapping[str, Any]) -> Node:
    """Return a node from plain data, of which nothing is trusted; its operands are edges."""
    if not isinstance(name, str) or not name:
        raise GraphError(f"node {name!r}: a node's name must be non-empty text")
    _check_keys(f"node {name}", data, _NODE_KEYS, required=("op", "results"))
    op = data["op"]
    if not isinstance(op, str):
        raise GraphError(f"node {name}: op must be text, got {op!r}")
    where = label_of(name, op)
    origin, choice = data.get("origin", ""), data.get("choice")
    if not isinstance(origin, str):
        raise GraphError(f"{where}: origin must be text, got {origin!r}")
    if choice is not None and not isinstance(choice, Choice):
        raise GraphError(f"{where}: choice must be a Choice or None, got {type(choice).__name__}")
    phase = data.get("phase", "")
    if phase and (phase != "backward" or op not in ("input", "output")):
        raise GraphError(f'{where}: phase is {phase!r}; an input or an output may have phase "backward"')
    if "data" in data and op != "constant":
        raise GraphError(f"{where}: only constants have data; remove the attribute")
    return Node(
        name,
        op,
        _attrs(where, op, data.get("attrs", {})),
        tuple(_type(f"{where}: results[{i}]", item) for i, item in enumerate(_list(where, "results", data))),
        tuple(_post_op(f"{where}: post_ops[{i}]", item) for i, item in enumerate(_list(where, "post_ops", data))),
        _descs(where, data),
        choice,
        origin,
        phase=phase,
        grids=_grids(where, op, data),
    )


def _grids(where: str, op: str, data: Mapping[str, Any]) -> dict[str, Grid]:
    if "grid" not in data:
        return {}
    if op != "constant":
        raise GraphError(f"{where}: only constants have a grid; remove the attribute")
    try:
        return {"dst": Grid.from_json(data["grid"])}
    except GraphError as error:
        raise GraphError(f"{where}: {error}") from error


def _check_keys(where: str, data: Mapping[Any, Any], known: tuple[str, ...], required: Iterable[str]) -> None:
    for key in required:
        if key not in data:
            raise GraphError(f"{where}: attribute {key!r} is missing")
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise GraphError(f"{where}: unknown attribute {key!r}; {hint}")


def _list(where: str, key: str, data: Mapping[str, Any]) -> list[Any]:
    items = data.get(key)
    if items is None and key != "results":
        return []
    if not isinstance(items, list | tuple):
        raise GraphError(f"{where}: {key} must be a list, got {items!r}")
    return list(items)


def _attrs(where: str, op: str, data: object) -> Any:
    try:
        return attrs_from_plain(op, data)
    except GraphError as error:
        raise GraphError(f"{where}: {error}") from error


def _type(where: str, item: object) -> TensorType:
    if not isinstance(item, Mapping) or set(item) != {"dims", "dtype"} or not isinstance(item["dims"], list | tuple):
        raise GraphError(f'{where} must look like {{"dims": [1, 8], "dtype": "f32"}}, got {item!r}')
    try:
        type_ = TensorType(item["dims"], item["dtype"])
    except ShapeError as error:
        raise GraphError(f"{where}: {error}") from error
    except ValueError:
        raise GraphError(f"{where}: unknown data type {item['dtype']!r}") from None
    if type_.nbytes >= 2**63:
        raise GraphError(f"{where}: {type_} needs {type_.nbytes} bytes, more than 64-bit offsets reach")
    return type_


def _post_op(where: str, item: object) -> PostOp:
    if not isinstance(item, Mapping):
        raise GraphError(f"{where} must be a mapping with op and attrs, got {item!r}")
    _check_keys(where, item, _POST_OP_KEYS, required=("op",))
    op, operand, origin, bias = item["op"], item.get("operand"), item.get("origin", ""), item.get("bias")
    if not isinstance(op, str) or not isinstance(operand, str | None) or not isinstance(origin, str):
        raise GraphError(f"{where}: op, operand and origin must be text, got {op!r}, {operand!r} and {origin!r}")
    if not isinstance(bias, str | None):
        raise GraphError(f"{where}: bias must be text, got {bias!r}")
    return PostOp(op, _attrs(where, op, item.get("attrs", {})), operand, origin, bias)


def _descs(where: str, data: Mapping[str, Any]) -> tuple[MemoryDesc, ...]:
    descs = _list(where, "descs", data)
    for i, desc in enumerate(descs):
        if not isinstance(desc, MemoryDesc):
            raise GraphError(f"{where}: descs[{i}] must be a MemoryDesc, got {type(desc).__name__}")
    return tuple(descs)


# ---------------------------------------------------------------- edges and order


def _inputs(nxg: nx.MultiDiGraph[str], node: Node) -> dict[str, Value]:
    found: dict[str, tuple[float, Value]] = {}
    for producer, _, operand, data in nxg.in_edges(node.name, keys=True, data=True):
        where = f"edge {producer} -> {node.name}"
        if not isinstance(operand, str):
            raise GraphError(f"{where}: the edge's key must be the name of the operand, got {operand!r}")
        _check_keys(f"{where} ({operand})", data, _EDGE_KEYS, required=())
        if operand in found:
            raise GraphError(f"{node.label}: operand {operand} is connected twice")
        result, position = data.get("result", 0), data.get("position", _declared_position(node, operand))
        if not isinstance(result, int) or isinstance(result, bool):
            raise GraphError(f"{where} ({operand}): result must be an index, got {result!r}")
        found[operand] = (_number(f"{where} ({operand})", "position", position), Value(producer, result))
    return {operand: found[operand][1] for operand in sorted(found, key=lambda key: (found[key][0], key))}


def _declared_position(node: Node, operand: str) -> float:
    """Return an operand's position in the op's declaration; post-op operands and unknown ones come last."""
    declared = () if node.is_boundary else opdef(node.op).operands
    try:
        found = None if node.is_boundary else port(node, operand)
    except GraphError:  # the verifier reports it
        found = None
    if found is None or found.declared not in declared or found.role is Role.POST_OP:
        return len(declared) + (0 if found is None else found.index)
    inside = 1 - 1 / (2 + found.index) if found.declared.variadic else 0
    return declared.index(found.declared) + inside


def _number(where: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GraphError(f"{where}: {key} must be a finite number, got {value!r}")
    return value


def _orders(nxg: nx.MultiDiGraph[str], nodes: Mapping[str, Node]) -> dict[str, float]:
    import networkx as nx

    given = nxg.nodes(data="order")
    orders = {name: _number(nodes[name].label, "order", order) for name, order in given if order is not None}
    if not orders:
        return {name: index for index, name in enumerate(nodes)}
    last = max(orders.values())
    # Readers first, so that a chain of new nodes is placed before its reader; a cycle is reported later, with its
    # names.
    acyclic = nx.is_directed_acyclic_graph(nxg)
    for name in reversed(list(nx.lexicographical_topological_sort(nxg))) if acyclic else nodes:
        if name in orders:
            continue
        known = [orders[reader] for reader in nxg.successors(name) if reader in orders]
        if known and not nodes[name].is_boundary:
            orders[name] = min(known) - 0.5
        else:
            last += 1
            orders[name] = last
    return orders
