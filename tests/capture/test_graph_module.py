from __future__ import annotations

import pytest
import torch
from torch import nn

from fmtprop.capture import GraphModule, from_torch, load
from fmtprop.errors import GraphError
from fmtprop.ir import Graph, PostOp, TensorType
from fmtprop.ops import Eltwise, emit
from tests.capture.checking import compare


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.conv_weight = nn.Parameter(torch.randn(8, 1, 1))  # its name without dots is that of conv.weight
        self.register_buffer("table", torch.arange(4))

    def forward(self, x, scale=2.0):
        y = torch.relu(self.conv(x)) * self.conv_weight * scale
        return {"y": y, "rolled": (torch.roll(y, 1, 0), self.table)}


X = torch.randn(2, 3, 8, 8)


def test_the_module_computes_what_the_graph_computes():
    module = Small().eval()
    back = GraphModule(from_torch(module, X))
    compare(back(X), module(X))
    assert sorted(p.numel() for p in back.parameters() if p.numel() > 1) == [8, 8, 216]
    assert [b.dtype for b in back.buffers()] == [torch.int64]
    assert not any(p.requires_grad for p in back.parameters())


def test_the_module_can_be_exported_and_imported_again():
    module = Small().eval()
    back = GraphModule(from_torch(module, X))
    program = torch.export.export(back, (X,))
    compare(program.module()(X), module(X))
    again = GraphModule(from_torch(program))
    compare(again(X), module(X))


def test_weights_are_shared_with_the_graph():
    graph = from_torch(nn.Linear(4, 4), torch.zeros(1, 4))
    pointers = {tensor.data_ptr() for tensor in graph.constants.values()}
    assert {p.data_ptr() for p in GraphModule(graph).parameters()} == pointers


def test_a_released_constant_is_named():
    graph = from_torch(nn.Linear(4, 4), torch.zeros(1, 4))
    released = graph.copy()
    released.constants.pop("bias")
    with pytest.raises(GraphError, match=r"constant bias of graph Linear was released; make the module before"):
        GraphModule(released)


def test_fused_post_ops_are_applied():
    graph = Graph("fused")
    graph.output(emit(graph, "eltwise", {"src": graph.input("x", TensorType((2, 3)))}, Eltwise("relu")))
    graph.replace(graph.node("relu_1").with_(post_ops=(PostOp("eltwise", Eltwise("tanh")),)))
    x = torch.randn(2, 3)
    compare(GraphModule(graph)(x), torch.tanh(torch.relu(x)))


def test_resnet50_can_be_exported():
    graph = load("resnet50")
    module = GraphModule(graph)
    x = torch.randn(1, 3, 224, 224)
    program = torch.export.export(module, (x,))
    compare(program.module()(x), module(x))


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of the ONNX exporter's own making
def test_resnet50_runs_in_onnx_runtime(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module = GraphModule(load("resnet50"))
    x = torch.randn(1, 3, 224, 224)
    path = tmp_path / "resnet50.onnx"
    torch.onnx.export(module, (x,), str(path), dynamo=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = module(x)
    assert (torch.from_numpy(found) - expected).abs().max() <= 1e-4 * expected.abs().max()
