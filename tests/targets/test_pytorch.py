"""PyTorch's own operators, bound to a plan's tensors, compute what references mean."""

from __future__ import annotations

import pickle

import pytest
import torch

from fmtprop.errors import PlanError
from fmtprop.ir.node import Choice, Node, PostOp
from fmtprop.ir.op import OPSET, Sample
from fmtprop.ir.tensors import torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.ops.binary import Binary
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.sum import Sum
from fmtprop.targets.bound import PythonCalls
from fmtprop.targets.pytorch import bind, call_reference

SAMPLES = [
    (op, sample)
    for op, declaration in OPSET.items()
    if declaration.pytorch.operator is not None
    for sample in declaration.samples()
]


def _tensors(sample: Sample) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    span = sample.high - sample.low
    return {
        name: (torch.rand(type_.dims) * span + sample.low).to(torch_dtype(type_.dtype))
        for name, type_ in sample.types.items()
    }


def _node(op: str, sample: Sample, post_ops: tuple[PostOp, ...] = ()) -> Node:
    results = OPSET[op].infer(sample.attrs, sample.types)
    return Node("it", op, sample.attrs, results, post_ops=post_ops)


def _run(node: Node, tensors: dict[str, torch.Tensor], last: bool = False) -> list[torch.Tensor]:
    places = [torch.full(type_.dims, 7, dtype=torch_dtype(type_.dtype)) for type_ in node.results]
    if last:
        tensors = {name: _channels_last(tensor) for name, tensor in tensors.items()}
        places = [_channels_last(place) for place in places]
    call = bind(node, tensors, places)
    call()
    call()  # as often as a plan runs
    return places


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


@pytest.mark.parametrize("last", [False, True], ids=["row_major", "channels_last"])
@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=[f"{op}-{sample.name}" for op, sample in SAMPLES])
def test_an_operator_computes_what_the_reference_means(op: str, sample: Sample, last: bool) -> None:
    node, tensors = _node(op, sample), _tensors(sample)
    for got, wanted in zip(_run(node, tensors, last), call_reference(node, tensors), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=[f"{op}-{sample.name}" for op, sample in SAMPLES])
def test_post_ops_follow_in_place(op: str, sample: Sample) -> None:
    plain = _node(op, sample)
    if len(plain.results) != 1 or not plain.results[0].dtype.is_floating:
        pytest.skip("an op without post-ops")
    tail = (
        PostOp("sum", Sum((0.5,)), "post_op_0"),
        PostOp("binary", Binary("mul"), "post_op_1"),
        PostOp("eltwise", Eltwise("tanh")),
        PostOp("eltwise", Eltwise("linear", 2.0, 1.0)),  # no single operator of PyTorch
    )
    for post_ops in (tail, tail[:3]):
        node, tensors = _node(op, sample, post_ops), _tensors(sample)
        tensors |= {name: torch.rand(plain.results[0].dims) for name in ("post_op_0", "post_op_1")}
        (got,), (wanted, *_) = _run(node, tensors), call_reference(node, tensors)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_relu_of_narrow_numbers_needs_no_conversion() -> None:
    types = {name: TensorType((8, 64), "bf16") for name in ("src_0", "src_1")}
    relu = (PostOp("eltwise", Eltwise("relu")),)
    node = Node("it", "binary", Binary("add"), (types["src_0"],), post_ops=relu)
    torch.manual_seed(0)
    tensors = {name: torch.randn(8, 64).bfloat16() for name in types}
    tensors["src_0"][0, :3] = torch.tensor([float("nan"), float("-inf"), -1e-38])
    with torch.profiler.profile() as profile:
        (got,) = _run(node, tensors)
    assert torch.equal(got.nan_to_num(9), call_reference(node, tensors)[0].nan_to_num(9))
    assert not any(event.key == "aten::_to_copy" for event in profile.key_averages())


@pytest.mark.parametrize("alg", ["relu", "tanh", "elu", "linear", "swish", "gelu_erf", "clip"])
def test_an_element_wise_operator_writes_over_its_source(alg: str) -> None:
    attrs = Eltwise(alg, *{"relu": (0.2,), "elu": (1.5,), "linear": (2.0,), "clip": (-0.5, 0.5)}.get(alg, (1.0,)))
    place = torch.randn(3, 5)
    (wanted,) = OPSET["eltwise"].reference(attrs, {"src": place.clone()})
    operator = OPSET["eltwise"].pytorch.operator
    call = operator(attrs, {"src": place}, [place]) if operator is not None else None
    assert call is not None
    call()
    torch.testing.assert_close(place, wanted)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, NotImplementedError, torch.linalg.LinAlgError])
def test_an_error_names_the_node_and_is_of_pytorchs_class_too(kind: type[Exception]) -> None:
    def refuse() -> None:
        raise kind("no such matrix")

    node = Node("it", "softmax", OPSET["softmax"].attrs(0), (), choice=Choice("reference", "torch", {}))
    text = r"node it \(softmax\) failed on the reference target: no such matrix"
    with pytest.raises(PlanError, match=text) as caught:
        PythonCalls([(node, refuse)])()
    assert isinstance(caught.value, kind)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (PlanError, str(caught.value))
