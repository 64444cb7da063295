"""Element-wise nodes between two grids as functions by a table."""

from __future__ import annotations

import pytest
import torch

import fmtprop as fp
from fmtprop.ir.graph import Graph
from fmtprop.ir.grid import Grid
from fmtprop.ir.tensors import tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.jit import LookupKernel
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Binary, Eltwise, FakeQuantize, Reshape, emit
from fmtprop.ops.evaluate import evaluate, evaluate_node
from fmtprop.ops.host_call import host_call
from fmtprop.ops.lookup import Lookup, numbers_of
from fmtprop.passes.precision.mark_grids import MarkGrids
from fmtprop.passes.rewrites.delay_reshapes import DelayReshapes
from fmtprop.passes.variants.tabulate import tabulated
from fmtprop.runtime.selfcheck import check_node
from fmtprop.targets import OneDnnTarget
from tests.targets.nodes import node_of

DIMS = (2, 3, 5, 7)


def swish(zero=0, extra_reader=False, other=False):
    """Return x · sigmoid(x) as a quantizer writes it, with a rounding of each result."""
    graph = Graph("swish")
    given = graph.input("x", TensorType(DIMS))
    x = emit(graph, "fake_quantize", {"src": given}, FakeQuantize(0.05, -zero, 255 - zero))
    gate = emit(graph, "eltwise", {"src": x}, Eltwise("logistic"))
    gate = emit(graph, "fake_quantize", {"src": gate}, FakeQuantize(1 / 256, 0, 255))
    product = emit(
        graph, "binary", {"src_0": x, "src_1": graph.input("y", TensorType(DIMS)) if other else gate}, Binary("mul")
    )
    graph.output(emit(graph, "fake_quantize", {"src": product}, FakeQuantize(0.04, -7, 248)))
    if extra_reader:
        graph.output(gate)
    return MarkGrids().run(graph)


def last(graph):
    return graph.node(graph.inputs(graph.output_nodes[0].name)["src"].node)


@pytest.mark.parametrize("zero", [0, 117, 128])
def test_a_function_with_roundings_inside_is_one_table(zero):
    graph = swish(zero)
    found = tabulated(graph, last(graph))
    assert found is not None and len(found.covers) == 4
    x = {"x": torch.randn(DIMS, generator=torch.Generator().manual_seed(0)) * 5}
    (source,) = found.inputs.values()
    numbers = evaluate_node(graph.node(source.node).with_(grids={}), {"src": x["x"]})[0]
    assert torch.equal(evaluate_node(found.node.with_(grids={}), {"src": numbers})[0], evaluate(graph, x)[0])


@pytest.mark.parametrize("graph", [swish(extra_reader=True), swish(other=True)], ids=["reader", "two tensors"])
def test_other_nodes_stay(graph):
    assert tabulated(graph, last(graph)) is None


def test_factors_of_single_numbers_are_a_part_of_the_function():
    graph = Graph("factor")
    x = emit(graph, "fake_quantize", {"src": graph.input("x", TensorType(DIMS))}, FakeQuantize(0.5, -128, 127))
    half = torch.full((1, 1, 1, 1), 0.25)
    inputs = {"src_0": x, "src_1": graph.constant("half", tensor_type(half), half)}
    graph.output(
        emit(
            graph, "fake_quantize", {"src": emit(graph, "binary", inputs, Binary("mul"))}, FakeQuantize(0.5, -128, 127)
        )
    )
    graph = MarkGrids().run(graph)
    found = tabulated(graph, last(graph))
    assert found is not None and isinstance(found.node.attrs, Lookup)
    assert found.node.attrs.table[:6] == (0, 0, 0, 1, 1, 1)  # halves to even


def gelu():
    """Return x · (1 + erf(x / sqrt(2))) / 2 with a rounding of each result: PyTorch alone has erf."""
    graph = Graph("gelu")

    def rounded(value, *grid):
        return emit(graph, "fake_quantize", {"src": value}, FakeQuantize(*grid))

    x = rounded(graph.input("x", TensorType(DIMS)), 0.05, -117, 138)
    scaled = emit(graph, "eltwise", {"src": x}, Eltwise("linear", 2**-0.5))
    attrs, inputs = host_call("aten.erf.default", {"self": scaled})
    gate = rounded(emit(graph, "aten", inputs, attrs), 1 / 128, -128, 127)
    gate = rounded(emit(graph, "eltwise", {"src": gate}, Eltwise("linear", 1.0, 1.0)), 1 / 128, 0, 255)
    product = rounded(emit(graph, "binary", {"src_0": x, "src_1": gate}, Binary("mul")), 0.08, -7, 248)
    graph.output(rounded(emit(graph, "eltwise", {"src": product}, Eltwise("linear", 0.5)), 0.04, -7, 248))
    return MarkGrids().run(graph)


def test_a_function_may_have_steps_of_pytorch():
    graph = gelu()
    found = tabulated(graph, last(graph))
    assert found is not None and len(found.covers) == 9
    numbers = torch.randn(DIMS, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(fp.compile(graph, confirm=False)(numbers), evaluate(graph, {"x": numbers})[0])


def test_a_rounding_moves_before_a_reshape():
    graph = Graph("rows")
    x = emit(graph, "eltwise", {"src": graph.input("x", TensorType((2, 6)))}, Eltwise("gelu_erf"))
    flat = emit(graph, "reshape", {"src": x}, Reshape((12,)))
    graph.output(emit(graph, "fake_quantize", {"src": flat}, FakeQuantize(0.5, 0, 255)))
    assert [node.op for node in DelayReshapes().run(graph).nodes() if not node.is_boundary] == [
        "eltwise",
        "fake_quantize",
        "reshape",
    ]


@pytest.mark.parametrize("dims", [(1,), (63,), (64,), (65,), (3, 4099), (2, 17, 5, 7)], ids=str)
@pytest.mark.parametrize(
    ("src", "dst"), [((0.0625, -128, 127), (0.01, 0, 255)), ((0.0625, -117, 138), (0.0625, -128, 127))]
)
def test_every_byte_is_looked_up(dims, src, dst):
    grids = {"src": Grid((src[0],), *src[1:]), "dst": Grid((dst[0],), *dst[1:])}
    attrs = Lookup.of(grids["src"], grids["dst"], numbers_of(grids["src"]).tanh())
    types = {"src": TensorType(dims)}
    node = node_of("lookup", attrs, types).with_(grids=grids)
    request = {name: MemoryDesc(dims, grid.stored) for name, grid in grids.items()}
    found = [one for one in OneDnnTarget().candidates(node, request) if one.target == "jit"]
    assert len(found) == LookupKernel(1, attrs.table).is_offered
    for candidate in found:
        results = (node.results[0].with_dtype(grids["dst"].stored),)
        assert check_node(node.with_(results=results, descs=candidate.results, choice=candidate.choice("test"))) is None


def test_a_plan_with_a_table_means_the_graph():
    graph = swish(117)
    x = torch.randn(DIMS, generator=torch.Generator().manual_seed(0)) * 5
    net = fp.compile(graph, confirm=False)
    assert torch.equal(net(x), evaluate(graph, {"x": x})[0])


@pytest.mark.parametrize("policy", ["optimal", "plain"])
def test_plans_of_a_function_and_of_a_sum_behind_it(policy):
    graph = swish(117)
    whole = Graph("both")
    x = whole.input("x", TensorType(DIMS))
    rounded = emit(whole, "fake_quantize", {"src": x}, FakeQuantize(0.05, -117, 138))
    gate = emit(whole, "eltwise", {"src": rounded}, Eltwise("logistic"))
    gate = emit(whole, "fake_quantize", {"src": gate}, FakeQuantize(1 / 256, 0, 255))
    total = emit(whole, "binary", {"src_0": rounded, "src_1": gate}, Binary("add"))
    whole.output(emit(whole, "fake_quantize", {"src": total}, FakeQuantize(0.04, -7, 248)))
    numbers = torch.randn(DIMS, generator=torch.Generator().manual_seed(0)) * 5
    for one in (graph, whole):
        net = fp.compile(one, confirm=False, policy=policy)
        assert torch.equal(net(numbers), evaluate(one, {"x": numbers})[0])
