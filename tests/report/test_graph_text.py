from __future__ import annotations

import json

import fmtprop as fp
from fmtprop.ir import Graph, TensorType
from fmtprop.ir.node import Node
from fmtprop.ops import Eltwise, emit
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.target import Setting
from fmtprop.report.graph_dot import graph_dot, graphs_dot
from fmtprop.report.graph_svg import graph_svg
from fmtprop.report.graph_text import (
    graph_data,
    graph_text,
    graphs_text,
    op_counts,
)
from fmtprop.targets import OneDnnTarget, ReferenceTarget


def tiny(name: str = "tiny") -> Graph:
    graph = Graph(name)
    x = graph.input("x", TensorType((1, 8)))
    scale = graph.constant("scale", TensorType((1, 8)), None)
    y = emit(graph, "eltwise", {"src": x}, Eltwise("clip", alpha=0.0, beta=float("inf")))
    graph.output(y)
    graph.output(scale)
    return graph


def formatted() -> Graph:
    graph = Graph("tiny")
    x = graph.input("x", TensorType((1, 8)))
    graph.output(emit(graph, "eltwise", {"src": x}, Eltwise("relu")))
    return AssignFormats("plain", Setting(OneDnnTarget(), ReferenceTarget())).run(graph)


def test_one_aligned_line_per_node():
    assert graph_text(tiny(), "imported").splitlines() == [
        "tiny, imported: 5 nodes; 1 clip",
        "x         input             f32[1,8]",
        "scale     constant          f32[1,8]",
        "clip_1    clip      x       f32[1,8]",
        "output_1  output    clip_1",
        "output_2  output    scale",
    ]


def test_formats_implementation_and_reason_once_chosen():
    (line,) = [line for line in graph_text(formatted()).splitlines() if line.startswith("relu_1")]
    node = formatted().node("relu_1")
    assert line.split("  ")[0] == "relu_1"
    assert node.choice is not None
    assert f"f32:ab  {node.choice.impl}" in line and line.endswith(node.choice.reason)


def test_second_results_are_told_apart():
    graph = Graph("two")
    x = graph.input("x", TensorType((2, 8)))
    row = TensorType((1, 8))
    _, second = graph.add(Node("halves", "eltwise", Eltwise("relu"), (row, row)), {"src": x})
    graph.output(second)
    assert graph_text(graph).splitlines()[2:] == [
        "halves    relu    x         f32[1,8], f32[1,8]",
        "output_1  output  halves:1",
    ]
    assert graph_data(graph)["nodes"][-1]["inputs"] == {"src": ["halves", 1]}
    assert '"halves" -> "output_1" [label="src: f32[1,8]"]' in graph_dot(graph)


def test_history_prints_what_did_not_change_once():
    first, second = tiny(), tiny()
    assert graphs_text([("a", first), ("b", second)]) == graph_text(first, "a") + "\n\n" + (
        graph_text(second, "b").splitlines()[0] + " (unchanged)"
    )


def test_counts_leave_the_boundary_out():
    assert op_counts(tiny()) == {"clip": 1}
    empty = Graph("empty")
    assert graph_text(empty) == "empty: 0 nodes"


def test_json_is_valid_where_floats_are_not():
    data = json.loads(json.dumps(graph_data(tiny()), allow_nan=False))
    (clip,) = [node for node in data["nodes"] if node["op"] == "eltwise"]
    assert clip["attrs"] == {"alg": "clip", "alpha": 0.0, "beta": {"float": "inf"}}
    assert clip["inputs"] == {"src": ["x", 0]}
    assert "formats" not in clip


def test_json_of_a_formatted_graph():
    (relu,) = [node for node in graph_data(formatted())["nodes"] if node["op"] == "eltwise"]
    assert (relu["target"], relu["formats"], relu["reads"]) == ("onednn", ["f32:ab"], {"src": "f32:ab"})
    json.dumps(relu)


def test_dot():
    lines = graph_dot(tiny(), constants=True).splitlines()
    assert lines[0] == 'digraph "tiny" {' and lines[-1] == "}"
    assert '  "x" -> "clip_1" [label="src: f32[1,8]"];' in lines
    assert '  "scale" [label="scale\\nconstant" shape=plain];' in lines
    assert any("f32:ab" in line for line in graph_dot(formatted()).splitlines() if "->" in line)


def test_pictures_leave_out_constants_and_what_is_packed_once():
    assert "scale" not in graph_dot(tiny())
    picture = graph_svg(tiny(), "a <title>")
    assert picture.startswith("<!-- fmtprop graph -->") and "scale" not in picture
    assert "a &lt;title&gt;" in picture
    assert picture.count("<rect") == 3 and picture.count("<path") == 2
    net = fp.compile("chain")
    assert "reorder_1" not in graph_svg(net.graph)  # the weights' packing
    assert "reorder_1" in graph_dot(net.graph, constants=True)


def test_pictures_of_graphs_in_notebooks():
    net = fp.compile("chain")
    assert "<svg" in net._repr_html_() and "overflow: auto" in net._repr_html_()
    shown = fp.load("chain")._repr_html_()
    assert "<td>conv_1</td>" in shown and "constant" not in shown


def test_dot_escapes_names():
    assert graph_dot(Graph('a"b\\c')).splitlines()[0] == 'digraph "a\\"b\\\\c" {'


def test_what_a_terminal_would_obey_is_escaped():
    graph = Graph("net\x1b[2J")
    x = graph.input("x\x1b[31m\ny", TensorType((1, 8)))
    graph.output(x)
    assert graph_text(graph, "imported").splitlines() == [
        "net\\x1b[2J, imported: 2 nodes",
        "x\\x1b[31m\\ny  input                 f32[1,8]",
        "output_1      output  x\\x1b[31m\\ny",
    ]
    assert graph_dot(graph).splitlines()[:3] == [
        'digraph "net\\\\x1b[2J" {',
        '  label="net\\\\x1b[2J"; labelloc=t; node [shape=box];',
        '  "x\\\\x1b[31m\\ny" [label="x\\\\x1b[31m\\\\ny\\ninput" shape=ellipse];',
    ]


def test_dot_of_several():
    text = graphs_dot([("imported", tiny()), ("normal", tiny())])
    assert text.count("digraph") == 2
    assert 'label="tiny, normal"' in text
