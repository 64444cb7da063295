"""What PyTorch's dispatcher answers, in the documents as in the target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fmtprop as fp
from fmtprop.compiling.stages import normalise
from fmtprop.ir.op import OPSET
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops.normalization import BatchNorm
from fmtprop.ops.prelu import Prelu
from fmtprop.runtime.selfcheck import check_node
from fmtprop.targets.mkldnn import MkldnnTarget, dispatcher
from fmtprop.targets.mkldnn.formats import opaque
from fmtprop.targets.mkldnn.function import TorchFunction
from fmtprop.targets.mkldnn.fused import fused_candidates
from fmtprop.targets.mkldnn.opaque import RULES
from scripts import generate_mkldnn_table
from tests.targets.nodes import chosen, node_of

DOCUMENT = generate_mkldnn_table.DOCUMENT.read_text(encoding="utf-8")


def test_every_op_with_a_primitive_has_its_row():
    rows = {line.split(" | ")[0].removeprefix("| ") for line in DOCUMENT.splitlines() if line.startswith("| ")}
    wanted = {name for name, op in OPSET.items() if op.primitive is not None}
    assert wanted <= rows


def test_the_document_is_what_this_pytorch_answers():
    version = torch.__version__.partition("+")[0]
    if f"PyTorch {version}:" not in DOCUMENT:
        pytest.skip(f"the table in the document is not that of PyTorch {version}")
    assert generate_mkldnn_table.main(["--check"]) == 0


def test_the_table_follows_the_dispatcher(monkeypatch):
    monkeypatch.setattr("fmtprop.targets.mkldnn.opaque.has_kernel", lambda operator, key: False)
    (row,) = [line for line in generate_mkldnn_table.capability_table().splitlines() if line.startswith("| softmax |")]
    assert row == "| softmax |  |  | `aten::_softmax` |"


def test_a_document_of_another_version_is_out_of_date(tmp_path, monkeypatch):
    changed = tmp_path / "mkldnn.md"
    changed.write_text(DOCUMENT.replace("| softmax |", "| hardmax |"), encoding="utf-8")
    monkeypatch.setattr(generate_mkldnn_table, "DOCUMENT", changed)
    assert generate_mkldnn_table.main(["--check"]) == 1
    assert generate_mkldnn_table.main([]) == 0
    assert generate_mkldnn_table.main(["--check"]) == 0


def test_what_the_dispatcher_has_runs_on_mkldnn_tensors():
    """The answers are those of PyTorch itself: an operator without a kernel raises."""
    x = torch.randn(1, 8, 4, 4).to_mkldnn()
    assert dispatcher.has_kernel("aten::relu") and torch.relu(x).is_mkldnn
    assert not dispatcher.has_kernel("aten::cat")
    with pytest.raises(RuntimeError):
        torch.cat([x, x], 1)
    assert {rule.operator for rule in RULES if not rule.available} >= {"aten::cat", "aten::sub.Tensor", "aten::silu"}


@pytest.mark.parametrize("op", ["batch_normalization", "prelu"])
def test_parameters_of_opaque_operators_stay_dense(op):
    image, vector = TensorType((2, 16, 6, 6)), TensorType((16,))
    if op == "prelu":
        node = node_of(op, Prelu(), {"src": image, "weights": TensorType((1, 16, 1, 1))})
    else:
        names = ("mean", "variance", "scale", "shift")
        node = node_of(op, BatchNorm(), {"src": image, **dict.fromkeys(names, vector)})
    plain = MemoryDesc(image.dims)
    operands = {"weights": MemoryDesc((1, 16, 1, 1))} if op == "prelu" else dict.fromkeys(names, MemoryDesc((16,)))
    node = chosen(MkldnnTarget(), node, {"src": opaque(plain), **operands})
    assert node.descs == (opaque(plain),)
    assert check_node(node) is None


def linear() -> tuple[fp.Graph, torch.nn.Module, torch.Tensor]:
    module, x = torch.nn.Linear(8, 4).eval(), torch.randn(3, 8)
    return fp.from_torch(module, x), module, x


def test_a_product_that_pytorch_does_not_run_is_not_offered(monkeypatch):
    """As in bf16 on AVX-512 without bf16 of its own, where packed weights have no inner product with many rows."""
    dims = {"src": (3, 8), "weights": (4, 8), "bias": (4,), "dst": (3, 4)}
    graph, _, _ = linear()
    (node,) = [node for node in normalise(graph)[0].nodes() if node.op == "inner_product"]
    request = {name: MemoryDesc.any(size, "bf16") for name, size in dims.items()}
    monkeypatch.setattr("fmtprop.targets.mkldnn.fused.computes_in", lambda dtype: True)
    tried = []

    def kernel(self, operator):
        def call(*tensors):
            tried.append([tuple(tensor.shape) for tensor in tensors])
            if fails:
                raise RuntimeError("could not create a primitive descriptor")

        return TorchFunction(call)

    monkeypatch.setattr("fmtprop.targets.mkldnn.fused._FusedFunctions.kernel", kernel)
    monkeypatch.setattr("fmtprop.targets.mkldnn.fused.stored", lambda tensor, desc: tensor)
    for fails in (False, True):
        assert len(list(fused_candidates(node, request))) == (not fails)
    assert tried == [[dims["src"], dims["weights"], dims["bias"]]] * 2


@pytest.mark.usefixtures("own_cache")  # no other test's check of the operator counts
def test_an_operator_that_raises_is_found_and_avoided(monkeypatch):
    def refuse(*tensors):
        raise RuntimeError("could not create a primitive")

    honest = MkldnnTarget.candidates

    def broken(self, node, request):
        for candidate in honest(self, node, request):
            fused = candidate.impl.startswith("mkldnn::_linear_pointwise")
            yield replace(candidate, handle=TorchFunction(refuse)) if fused else candidate

    monkeypatch.setattr(MkldnnTarget, "candidates", broken)
    graph = linear()[0]
    with pytest.warns(RuntimeWarning, match=r"node .*_linear_pointwise.* is off by inf.*; planning around it"):
        net = fp.compile(graph, target="mkldnn", verify="full")
    assert [step.node.choice.impl for step in net.plan.steps] == ["aten"]
