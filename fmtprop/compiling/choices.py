"""The choices of a plan as text, for the same graph in another process: formats and implementations, no weights.

They are advice, as the choices of another shape of a model are: what is computed comes from the graph that is compiled
with them. So neither old nor hostile text makes a result wrong, but for a defect of oneDNN that a check would find.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fmtprop.compiling.options import Options
from fmtprop.compiling.planned import Planned
from fmtprop.errors import GraphError
from fmtprop.ir.graph import Graph
from fmtprop.ir.json_text import parse_json
from fmtprop.planfile.descs import Descs, descs_of
from fmtprop.planfile.environment import environment
from fmtprop.planfile.rows import graph_of, rows_of


def key_of_graph(graph: Graph, options: Options) -> str:
    """Return a hash of what choices depend on: the imported graph without its numbers, the options, and the machine.

    Raises GraphError if the graph has attributes that text cannot hold.
    """
    descs = Descs()
    how = sorted(asdict(replace(options, progress=None, stage=None)).items())
    parts = [rows_of(graph, descs), descs.rows, repr(how), environment(options.target)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def choices_text(planned: Planned) -> str:
    """Return the choices of a plan as text.

    Raises GraphError if the graph has attributes that text cannot hold.
    """
    descs, graph = Descs(), planned.formatted
    rows = rows_of(graph, descs)
    return json.dumps({"name": graph.name, "nodes": rows, "descs": descs.rows, "rewrite": planned.rewrite})


def choices_of(text: str) -> tuple[Graph, str]:
    """Return the formatted graph of a text, of which nothing is trusted, and the name of its rewrite.

    Raises GraphError or PlanError if the text is malformed.
    """
    row: Mapping[str, Any] = parse_json(text)
    if not isinstance(row, dict) or not isinstance(row.get("nodes"), list):
        raise GraphError("choices must be an object with nodes")
    return graph_of(str(row.get("name")), "", row["nodes"], descs_of(row.get("descs"))), str(row.get("rewrite"))
