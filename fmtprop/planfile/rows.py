"""A formatted graph as plain data: the rows of a graph file, with the choice of each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fmtprop.errors import FmtpropError, GraphError, PlanError
from fmtprop.ir import Choice, Graph, Grid, Node, Value
from fmtprop.ir.file import producer_of, read_floats, reference_to, spell_floats
from fmtprop.ir.networkx_form import node_of, plain_node
from fmtprop.ir.plain import attrs_from_plain
from fmtprop.ir.structure_check import check_structure
from fmtprop.layout import MemoryDesc
from fmtprop.planfile.descs import Descs, at

#: fields of a node, of which those of a choice are one object
_FIELDS = frozenset(
    {"name", "op", "inputs", "attrs", "results", "post_ops", "origin", "phase", "exact", "grids", "descs", "choice"}
)
#: fields that a graph file's row lacks
_OWN = frozenset({"name", "inputs", "exact", "grids", "descs", "choice"})
_CHOICE = {"target": str, "impl": str, "operands": dict, "reason": str, "cost": float, "runs": dict}


def rows_of(graph: Graph, descs: Descs) -> list[dict[str, Any]]:
    """Return the rows of a formatted graph, in topological order.

    Raises GraphError if a node has attributes that could not be read again, or calls an operator that a file must not
    name.
    """
    return [_row(graph, node, descs) for node in graph.nodes()]


def _row(graph: Graph, node: Node, descs: Descs) -> dict[str, Any]:
    plain = plain_node(node)
    attrs_from_plain(node.op, plain["attrs"])
    row: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "inputs": {operand: reference_to(value) for operand, value in graph.inputs(node.name).items()},
        "attrs": spell_floats(plain["attrs"]),
        "results": plain["results"],
        "post_ops": spell_floats(plain["post_ops"]),
        "origin": node.origin,
        "phase": node.phase,
        "exact": node.exact,
        "grids": {name: grid.to_json() for name, grid in node.grids.items()},
        "descs": [descs.place(desc) for desc in node.descs],
    }
    if node.choice is not None:
        row["choice"] = _choice_row(node.choice, descs)
    # empty fields are left out, for a short file
    return {key: item for key, item in row.items() if item or key == "results"}


def _choice_row(choice: Choice, descs: Descs) -> dict[str, Any]:
    row: dict[str, Any] = {
        "target": choice.target,
        "impl": choice.impl,
        "operands": {name: descs.place(desc) for name, desc in choice.operands.items()},
        "reason": choice.reason,
        "cost": spell_floats(float(choice.cost)),
    }
    if choice.handle is not None:  # of a node that a loaded plan does not run, it is still the identity
        row["runs"] = dict(getattr(choice.handle, "identity", choice.handle))
    return row


def graph_of(name: str, structure: str, rows: Sequence[Any], descs: Sequence[MemoryDesc]) -> Graph:
    """Return the graph of some rows, of which nothing is trusted; a choice's handle is its identity in the file."""
    graph = Graph(name, structure)
    for index, row in enumerate(rows):
        try:
            node, inputs = _node(index, row, descs)
            graph.add(node, inputs)
        except FmtpropError as error:
            raise PlanError(f"its node {index} is malformed: {error}") from error
    try:
        check_structure(structure, len(graph.input_nodes), len(graph.output_nodes))
    except GraphError as error:
        raise PlanError(str(error)) from error
    return graph


def _node(index: int, row: Any, descs: Sequence[MemoryDesc]) -> tuple[Node, dict[str, Value]]:
    where = f"nodes[{index}]"
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise GraphError(f'{where} must be an object with a "name"')
    if unknown := sorted(set(row) - _FIELDS):
        raise GraphError(f"{where}: unknown key {unknown[0]!r}")
    plain = {key: item for key, item in row.items() if key not in _OWN}
    for key in ("attrs", "post_ops"):
        if key in plain:
            plain[key] = read_floats(where, plain[key])
    if "descs" in row:
        plain["descs"] = [at(descs, place, "format") for place in _list(where, row["descs"])]
    if "choice" in row:
        plain["choice"] = _choice(where, row["choice"], descs)
    node = node_of(row["name"], plain)
    if row.get("exact", False) not in (True, False):
        raise GraphError(f"{where}: exact must be true or false")
    inputs = row.get("inputs", {})
    if not isinstance(inputs, dict):
        raise GraphError(f"{where}: inputs must map operands to nodes")
    values = {operand: Value(*producer_of(where, reference)) for operand, reference in inputs.items()}
    grids = row.get("grids", {})
    if not isinstance(grids, dict):
        raise GraphError(f"{where}: grids must map operands and results to grids")
    if row.get("exact") or grids:
        made = {name: Grid.from_json(grid) for name, grid in grids.items()}
        node = node.with_(exact=bool(row.get("exact")), grids=made)
    return node, values


def _list(where: str, item: Any) -> list[Any]:
    if not isinstance(item, list):
        raise GraphError(f"{where}: descs must be a list")
    return item


def _choice(where: str, row: Any, descs: Sequence[MemoryDesc]) -> Choice:
    fields: dict[str, Any] = {**row, "cost": read_floats(where, row.get("cost"))} if isinstance(row, dict) else {}
    if isinstance(fields.get("cost"), int):
        fields["cost"] = float(fields["cost"])
    for key, kind in _CHOICE.items():
        if not isinstance(fields.get(key), kind) and (key != "runs" or key in fields):
            raise GraphError(f"{where}: choice.{key} must be {kind.__name__}")
    if unknown := sorted(set(fields) - set(_CHOICE)):
        raise GraphError(f"{where}: choice has the unknown key {unknown[0]!r}")
    operands = {name: at(descs, place, "format") for name, place in fields["operands"].items()}
    identity = fields.get("runs")
    if identity is not None and not all(isinstance(part, str) for part in identity.values()):
        raise GraphError(f"{where}: choice.runs must map text to text")
    handle: Mapping[str, str] | None = identity
    return Choice(fields["target"], fields["impl"], operands, fields["reason"], fields["cost"], handle)
