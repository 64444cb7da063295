"""The graph file: one JSON document, one node per line, and a second file of weights.

Layout of version 1::

    {
    "format": "fmtprop-graph", "version": 1, "name": "tiny", "structure": "", "weights": "tiny.safetensors",
    "nodes": [
    {"name": "x", "op": "input", "results": [{"dims": [1, 8], "dtype": "f32"}]},
    {"name": "relu_1", "op": "eltwise", "inputs": {"src": "x"}, "attrs": {"alg": "relu", "alpha": 0.0, "beta": 0.0},
     "results": [{"dims": [1, 8], "dtype": "f32"}]},
    {"name": "output_1", "op": "output", "inputs": {"src": "relu_1"}, "results": []}
    ]
    }

Nodes are in the order in which they were added. An operand may name a later node; ``["split_1", 2]`` is the third
result of a node. Attributes, results and post-ops have the form of :mod:`fmtprop.ir.networkx_form`; a float that JSON
lacks is ``{"float": "inf"}``. :mod:`fmtprop.ir.file_data` writes constants. Formats and choices are not stored: they
depend on the machine and the library.

Nothing in a file is trusted: each flaw is one :class:`~fmtprop.errors.GraphError`, which names the file and the place
in it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtprop.errors import GraphError
from fmtprop.ir.file_data import ConstantWriter, Reader
from fmtprop.ir.graph import Graph
from fmtprop.ir.json_text import parse_json
from fmtprop.ir.networkx_form import plain_node
from fmtprop.ir.node import Value
from fmtprop.ir.plain import attrs_from_plain
from fmtprop.ir.verify import Stage, verify
from fmtprop.system.files import check_replaceable, read, replacing

if TYPE_CHECKING:
    import networkx as nx

FORMAT = "fmtprop-graph"
VERSION = 1

#: limit of a document: a graph of a hundred thousand nodes has a third of it, and is many times as large in Python
MAX_NBYTES = 1 << 27
#: the beginning of a document
_OURS = re.compile(rb'\s*\{[^{}\[\]]*"format":\s*"fmtprop-graph"')

_HEAD = {"format": str, "version": int, "name": str, "structure": str, "nodes": list}
_ROW_KEYS = frozenset({"name", "op", "inputs", "attrs", "results", "post_ops", "origin", "data", "phase", "grid"})


# ---------------------------------------------------------------- save


def save(graph: Graph, path: str | os.PathLike[str], weights: str = "auto") -> None:
    """Write a graph to a JSON file, and its large constants to a safetensors file in the same folder.

    `path`: the JSON file; the side file has the same stem and the suffix ``.safetensors``. `weights`: ``"auto"``:
    tensors of up to 64 elements go to the JSON file, larger ones to the side file. ``"inline"``: all tensors go to the
    JSON file. Initialisers stay initialisers in both cases.

    >>> import pathlib, tempfile
    >>> from fmtprop.ir import TensorType
    >>> g = Graph("tiny")
    >>> g.output(g.input("x", TensorType((1, 8))))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(g, pathlib.Path(folder) / "tiny.json")
    ...     load(pathlib.Path(folder) / "tiny.json")
    <Graph tiny: 2 nodes, 1 edges>
    """
    target = Path(path)
    if weights not in ("auto", "inline"):
        raise GraphError(f'weights must be "auto" or "inline", got {weights!r}')
    verify(graph, Stage.IMPORTED)
    writer = ConstantWriter(target.with_suffix(".safetensors"), inline=weights == "inline")
    rows = [json.dumps(_row(graph, name, writer), ensure_ascii=False, allow_nan=False) for name in _added(graph)]
    head = {"format": FORMAT, "version": VERSION, "name": graph.name, "structure": graph.structure}
    if writer.tensors:
        head["weights"] = writer.path.name
    fields = json.dumps(head, ensure_ascii=False)[1:-1]
    text = "{\n" + fields + ',\n"nodes": [\n' + ",\n".join(rows) + "\n]\n}\n"
    data = text.encode("utf-8")
    if len(data) > MAX_NBYTES:
        raise GraphError(f"needs {len(data)} bytes, a graph file may have {MAX_NBYTES}; leave out weights='inline'")
    check_replaceable(target, _OURS)  # before the side file is replaced
    writer.write()
    # A reader never sees an incomplete file: the side file is complete before the document that names it exists.
    with replacing(target, _OURS) as temporary:
        temporary.write_bytes(data)


def _added(graph: Graph) -> list[str]:
    orders = graph.to_networkx().nodes(data="order")
    return [name for name, _ in sorted(orders, key=lambda pair: pair[1])]


def _row(graph: Graph, name: str, writer: ConstantWriter) -> dict[str, Any]:
    node = graph.node(name)
    plain = plain_node(node)
    attrs_from_plain(node.op, plain["attrs"])  # refuse attributes that could not be read again
    inputs = {operand: reference_to(value) for operand, value in graph.inputs(name).items()}
    row: dict[str, Any] = {"name": name, "op": node.op, "inputs": inputs}
    row["attrs"] = spell_floats(plain["attrs"])
    row["results"] = plain["results"]
    row["post_ops"] = spell_floats(plain["post_ops"])
    row["origin"] = node.origin
    row["phase"] = node.phase
    if node.op == "constant":
        row["data"] = writer.data(node, graph.constants[name])
        row["grid"] = plain.get("grid")
    # Empty fields are left out, for a short file.
    return {key: item for key, item in row.items() if item or key == "results"}


def reference_to(value: Value) -> str | list[Any]:
    """Return a value as a row names it."""
    return value.node if value.index == 0 else [value.node, value.index]


def spell_floats(item: Any) -> Any:
    """Return plain data in which floats that JSON lacks are ``{"float": "inf"}`` and the like."""
    if isinstance(item, float) and not math.isfinite(item):
        return {"float": str(item)}
    if isinstance(item, list | tuple):
        return [spell_floats(part) for part in item]
    if isinstance(item, dict):
        return {key: spell_floats(part) for key, part in item.items()}
    return item


# ---------------------------------------------------------------- load


def load(path: str | os.PathLike[str], *, deferred: bool = False) -> Graph:
    """Read a graph file."""
    source = Path(path)
    try:
        document = _parse(source)
        nxg = _assemble(document, Reader(source.parent, document.get("weights"), deferred))
        graph = Graph.from_networkx(nxg)
        nxg.clear()  # its cached views would keep it and all weights alive until the next garbage collection
        verify(graph, Stage.IMPORTED)
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from error
    return graph


def _parse(source: Path) -> dict[str, Any]:
    try:
        text = read(source, MAX_NBYTES).decode("utf-8")
    except OSError as error:
        raise GraphError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GraphError(f"is not a graph file: byte {error.start} is not UTF-8 text") from error
    if not text.strip():
        raise GraphError("is empty; a graph file is a JSON object")
    document = parse_json(text)
    _check_head(document)
    checked: dict[str, Any] = document
    return checked


def _check_head(document: object) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise GraphError(f'is not a graph file: "format" must be {FORMAT!r}, got {found!r}')
    if document.get("version") != VERSION or isinstance(document["version"], bool):
        found = document.get("version")
        raise GraphError(f'"version" is {found!r}, this program reads version {VERSION}; save the graph again')
    for key, kind in _HEAD.items():
        if not isinstance(document.get(key), kind):
            raise GraphError(f"{json.dumps(key)} must be {kind.__name__}, got {document.get(key)!r}")
    unknown = sorted(set(document) - set(_HEAD) - {"weights"})
    if unknown:
        raise GraphError(f"unknown key {unknown[0]!r}")


def _assemble(document: Mapping[str, Any], reader: Reader) -> nx.MultiDiGraph[str]:
    import networkx as nx

    nxg: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=document["name"], structure=document["structure"])
    rows = document["nodes"]
    for index, row in enumerate(rows):
        _add_node(nxg, index, row, reader)
    for index, row in enumerate(rows):
        for position, (operand, reference) in enumerate(row.get("inputs", {}).items()):
            where = f"nodes[{index}] ({row['name']}): inputs.{operand}"
            producer, result = producer_of(where, reference)
            if producer not in nxg:
                raise GraphError(f"{where} names {producer!r}, but there is no such node")
            nxg.add_edge(producer, row["name"], key=operand, result=result, position=position)
    return nxg


def _add_node(nxg: nx.MultiDiGraph[str], index: int, row: object, reader: Reader) -> None:
    where = f"nodes[{index}]"
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise GraphError(f'{where} must be an object with a "name"')
    name = row["name"]
    where = f"{where} ({name})"
    if name in nxg:
        raise GraphError(f"{where}: there is another node of this name")
    unknown = sorted(set(row) - _ROW_KEYS)
    if unknown:
        raise GraphError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_ROW_KEYS))}")
    if not isinstance(row.get("inputs", {}), dict):
        raise GraphError(f"{where}: inputs must map operands to nodes, got {row['inputs']!r}")
    plain = {key: item for key, item in row.items() if key not in ("name", "inputs", "data")}
    for key in ("attrs", "post_ops"):
        if key in plain:
            plain[key] = read_floats(where, plain[key])
    if "data" in row:
        plain["data"] = reader.data(where, row)
    nxg.add_node(name, order=index, **plain)


def producer_of(where: str, reference: object) -> tuple[str, int]:
    """Return the node and the index that a row's reference names."""
    if isinstance(reference, str):
        return reference, 0
    if isinstance(reference, list) and len(reference) == 2:
        name, index = reference
        if isinstance(name, str) and isinstance(index, int) and not isinstance(index, bool):
            return name, index
    raise GraphError(f'{where} must be "node" or ["node", index], got {reference!r}')


def read_floats(where: str, item: Any) -> Any:
    """Return plain data with the floats that :func:`spell_floats` spelled."""
    if isinstance(item, dict):
        if set(item) == {"float"}:
            if item["float"] not in ("inf", "-inf", "nan"):
                raise GraphError(f'{where}: {item!r} must be {{"float": "inf"}}, "-inf" or "nan"')
            return float(item["float"])
        return {key: read_floats(where, part) for key, part in item.items()}
    if isinstance(item, list):
        return [read_floats(where, part) for part in item]
    return item
