"""An op of somebody's own, declared in this file alone: imported, fused, costed, cut into slices of a batch, run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.ir.facets import Cost, each_image
from fmtprop.ir.graph import Graph
from fmtprop.ir.importing import Call
from fmtprop.ir.node import Attrs, Value
from fmtprop.ir.op import OPSET, Category, Lowering, OpDef, Operand, PostOpForm, Sample
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import emit
from fmtprop.ops.building import lowering
from fmtprop.passes.target import Candidate
from fmtprop.passes.variants.slice_batch import SliceBatch
from fmtprop.targets.onednn import OneDnnTarget
from fmtprop.tuning.peaks import FOOTPRINTS, Peaks
from fmtprop.tuning.roofline import ModelCosts

# ---------------------------------------------------------------- the op


@dataclass(frozen=True)
class Steep(Attrs):
    """Softplus with a slope."""

    beta: float


def infer(attrs: Steep, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    return (types["src"],)


def reference(attrs: Steep, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (torch.nn.functional.softplus(tensors["src"], attrs.beta),)


def primitive(attrs: Steep, descs: Mapping[str, dnnl.NativeDesc], attr: dnnl.PrimitiveAttr | None) -> Lowering:
    problem = dnnl.Eltwise(src=descs["src"], dst=descs["dst"], alg="eltwise_soft_relu", alpha=attrs.beta, beta=0.0)
    return lowering(dnnl.create(problem, attr), {"src": "src", "dst": "dst"})


def append(attrs: Steep, tail: dnnl.PostOps, operands: Sequence[dnnl.NativeDesc], dtype: DataType) -> None:
    tail.append_eltwise("eltwise_soft_relu", attrs.beta, 0.0)


def importer(call: Call) -> Value | None:
    return call.emit("steep", {"src": call["x"]}, Steep(call["beta"]))


def samples() -> Iterable[Sample]:
    yield Sample("image", Steep(3.0), {"src": TensorType((2, 17, 5, 7))})


STEEP = OpDef(
    name="steep",
    attrs=Steep,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    primitive=primitive,
    elementwise=True,
    sliced=each_image,
    cost=Cost(lambda attrs, gathered: 1000.0),
    as_post_op=PostOpForm("eltwise", append),
    inplace=frozenset({"src"}),
    samples=samples,
    torch={"fmtprop_tests.steep.default": importer},
)


@torch.library.custom_op("fmtprop_tests::steep", mutates_args=())
def steep(x: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.nn.functional.softplus(x, beta)


@steep.register_fake
def _(x: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(OPSET, "steep", STEEP)
    yield


# ---------------------------------------------------------------- what it takes part in


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return steep(self.conv(steep(x, 2.0)), 3.0)


def test_it_is_imported_and_run_alone_and_behind_a_convolution() -> None:
    x, model = torch.randn(2, 3, 9, 9), Net().eval()
    net = fp.compile(model, x, tune="model")
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)
    steps = [step.node for step in net.plan.steps if step.node.op != "reorder"]
    assert [(node.op, [post_op.op for post_op in node.post_ops]) for node in steps] == [
        ("steep", []),
        ("convolution", ["steep"]),
    ]
    assert {node.choice.target for node in steps if node.choice} == {"onednn"}


def _cost(declaration: OpDef) -> float:
    graph = Graph("one")
    src = MemoryDesc((1, 64, 56, 56), "f32")
    value = emit(graph, "steep", {"src": graph.input("x", TensorType(src.dims))}, Steep(1.0))
    peaks = Peaks({DataType.F32: 1e11}, dict.fromkeys(FOOTPRINTS, 4e10), 5e10, 1e-6)
    return ModelCosts(peaks, 0).node(graph.node(value.node), Candidate("onednn", "jit:avx2", {"src": src}, (src,)))


def test_its_cost_is_the_declared_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = _cost(STEEP)
    monkeypatch.setitem(OPSET, "steep", replace(STEEP, cost=Cost()))
    assert dear > 10 * _cost(STEEP)


@pytest.mark.parametrize(("rule", "slices"), [(each_image, 2), (None, 0)])
def test_a_batch_is_cut_where_it_says_so(monkeypatch: pytest.MonkeyPatch, rule: object, slices: int) -> None:
    monkeypatch.setitem(OPSET, "steep", replace(STEEP, sliced=rule))
    graph = Graph("batch")
    graph.output(emit(graph, "steep", {"src": graph.input("x", TensorType((2, 8, 4, 4)))}, Steep(1.0)))
    cut = SliceBatch(images=1, cache_nbytes=0).run(graph)
    assert sum(node.op == "steep" and node.results[0].dims[0] == 1 for node in cut.nodes()) == slices


def test_onednn_has_the_post_op_that_it_declares() -> None:
    x, model = torch.randn(2, 3, 9, 9), torch.nn.Sequential(Net(), torch.nn.Conv2d(16, 4, 1)).eval()
    net = fp.compile(model, x, tune="model", verify="full")
    assert OneDnnTarget.name in {step.node.choice.target for step in net.plan.steps if step.node.choice}
