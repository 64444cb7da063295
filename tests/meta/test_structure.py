"""The house as a whole: who imports whom, lazily or not, and one name for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

import fmtprop

ROOT = Path(fmtprop.__file__).parent

TREES = {
    ".".join(("fmtprop", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): ast.parse(
        path.read_text(encoding="utf-8")
    )
    for path in ROOT.rglob("*.py")
}

#: the room of oneDNN's own names, such as those of primitives and post-ops, which ours correspond to
DNNL = "fmtprop.dnnl."


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a module imports anywhere, except for annotations."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = [f"{node.module}.{name.name}" for name in node.names]
            yield from (member if member in TREES else node.module for member in members)
        yield from imported(node)


def test_no_module_leads_back_to_itself():
    graph = nx.DiGraph()
    for module, tree in TREES.items():
        graph.add_edges_from((module, other) for other in imported(tree) if other in TREES and other != module)
    assert len(graph) > 400
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_no_two_classes_have_one_name():
    found = defaultdict(list)
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not module.startswith(DNNL):
                found[node.name].append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
