from __future__ import annotations

import pytest
import torch

from fmtprop.errors import GraphError
from fmtprop.ir import TensorType, Value
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ops import Expand, Permute, Reshape
from fmtprop.ops.host_call import HostCall
from fmtprop.passes.rewrites.fold_constants import FoldConstants
from tests.passes.rewriting import Builder, rewrite, summary


def test_chains_of_constants_fold_and_the_order_stays():
    build = Builder()
    x = build.input(2, 3)
    before = build.act(x, "relu", "first")
    table = build.act(build.act(build.constant(build.random(2, 3))), "abs")
    graph = build.output(build.binary("add", before, table, "sum"), table)
    folded = rewrite(graph, FoldConstants())
    assert summary(folded) == ["first", "sum"]
    constants = [node.name for node in folded.nodes() if node.op == "constant"]
    assert constants == ["abs_constant_1"] and list(folded.constants) == constants


def test_views_share_the_memory_of_the_original():
    build = Builder()
    data = build.random(4, 6)
    w = build.constant(data)
    turned = build.op("permute", Permute((1, 0)), src=w)
    wide = build.op("expand", Expand((5, 2, 12)), src=build.op("reshape", Reshape((1, 2, 12)), src=w))
    folded = rewrite(build.output(turned, wide), FoldConstants())
    assert summary(folded) == []
    a, b = (folded.constants[folded.inputs(node.name)["src"].node] for node in folded.output_nodes)
    assert a.data_ptr() == b.data_ptr() == data.data_ptr()
    assert a.stride() == (1, 6) and b.stride() == (0, 12, 1)


def test_initialisers_are_drawn_only_where_they_are_read():
    build = Builder()
    type_ = TensorType((2, 3))
    lazy = build.graph.constant("lazy", type_, Initialiser.normal(1, 0.0, 1.0))
    read = build.graph.constant("read", type_, Initialiser.normal(2, 0.0, 1.0))
    folded = rewrite(build.output(build.binary("mul", build.input(2, 3), lazy), build.act(read)), FoldConstants())
    assert folded.constants["lazy"] == Initialiser.normal(1, 0.0, 1.0)
    assert "read" not in folded and isinstance(folded.constants["relu_constant_1"], torch.Tensor)


def test_all_results_of_a_node_are_replaced():
    build = Builder()
    attrs = HostCall("aten.topk.default", '{"self": {"tensor": "src_0"}, "k": 2}')
    first = build.op("aten", attrs, "top", src_0=build.constant(build.random(3, 5)))
    folded = rewrite(build.output(first, Value("top", 1)), FoldConstants())
    assert [folded.type_of(folded.inputs(n.name)["src"]).dtype.value for n in folded.output_nodes] == ["f32", "s64"]
    assert summary(folded) == []


def test_what_depends_on_an_input_stays():
    build = Builder()
    graph = build.output(build.act(build.input(2, 3)))
    assert summary(rewrite(graph, FoldConstants())) == ["relu"]


def test_a_failing_call_names_the_node():
    build = Builder()
    attrs = HostCall(
        "aten.index_select.default", '{"self": {"tensor": "src_0"}, "dim": 0, "index": {"tensor": "src_1"}}'
    )
    table, index = build.constant(build.random(3, 5)), build.constant(torch.tensor([7]))
    graph = build.output(build.op("aten", attrs, "pick", src_0=table, src_1=index))
    with pytest.raises(GraphError, match=r"node pick \(aten\) cannot be computed from its constants: "):
        FoldConstants().run(graph)
