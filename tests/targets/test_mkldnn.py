"""The mkldnn target: what it offers, what it computes, what it packs once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fmtprop as fp
from fmtprop.errors import InputError, UnsupportedOpError
from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.op import opdef
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops.binary import Binary
from fmtprop.ops.convolution import Conv
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.evaluate import evaluate
from fmtprop.ops.pooling import Pooling
from fmtprop.ops.reorder import Reorder
from fmtprop.ops.softmax import Softmax
from fmtprop.ops.sum import Sum
from fmtprop.passes.assignment.formats import channels_last
from fmtprop.runtime.agreement import relative_error
from fmtprop.runtime.selfcheck import Mismatch, check_node, check_steps
from fmtprop.targets.mkldnn import MkldnnTarget, dispatcher
from fmtprop.targets.mkldnn.costs import MkldnnCosts
from fmtprop.targets.mkldnn.formats import is_opaque, opaque, packed, packing_of
from fmtprop.targets.mkldnn.function import TorchFunction
from fmtprop.targets.mkldnn.fused import ConvPacking, DeconvPacking, LinearPacking
from tests.targets.nodes import chosen, convolution, node_of, request

IMAGE = (2, 16, 10, 10)
PLAIN = MemoryDesc(IMAGE, "f32")
ANY = MemoryDesc.any(IMAGE, "f32")
RELU = PostOp("eltwise", Eltwise("relu"))
ADD = PostOp("binary", Binary("add"), "post_op_0")


@pytest.fixture
def target() -> MkldnnTarget:
    return MkldnnTarget()


def errors(net: fp.CompiledModel, graph: fp.Graph) -> float:
    """Return the largest relative error of a compiled graph against PyTorch, of which it must not consist."""
    assert "mkldnn" in {step.target for step in net.plan.steps}
    inputs = net.random_inputs()
    expected = evaluate(graph, {node.name: x for node, x in zip(graph.input_nodes, inputs, strict=True)})
    return max(relative_error(got, want) for got, want in zip(net.run_flat(inputs), expected, strict=True))


@pytest.mark.parametrize("recipe", [ConvPacking, DeconvPacking, LinearPacking])
def test_weights_are_converted_before_they_are_packed(recipe, target, monkeypatch):
    monkeypatch.setattr(recipe, "pack", lambda self, weights: weights)
    fields = [None] * len(dataclasses.fields(recipe))
    packing = Node("p", "reorder", Reorder(), (TensorType((4, 3), "bf16"),))
    formats = {"src": MemoryDesc((4, 3)), "dst": packed(MemoryDesc((4, 3), "bf16"), recipe(*fields))}
    (candidate,) = target.candidates(packing, formats)
    assert candidate.handle.call(torch.ones(4, 3)).dtype == torch.bfloat16


# ---------------------------------------------------------------- offers


def test_a_convolution_is_fused_channels_last_with_weights_packed_for_it(target):
    node, formats = convolution(post_ops=[RELU])
    (offer, *others) = target.candidates(node, request(node, formats))
    assert not others  # PyTorch's own would pack weights on every call
    assert offer.impl == "mkldnn::_convolution_pointwise+relu"
    assert offer.operands["src"].tag == offer.results[0].tag == "acdb"
    assert packing_of(offer.operands["weights"]).src == (2, 16, 10, 10)


def test_row_major_convolutions_are_pytorchs_own(target):
    node, formats = convolution()
    plain = {name: MemoryDesc(desc.dims, "f32") for name, desc in formats.items()}
    (offer,) = target.candidates(node, request(node, plain))
    assert offer.impl == "aten" and offer.results[0].tag == "abcd"


def test_a_slice_of_support_is_left_to_dense_operators(target):
    """Padding of two sizes, one spatial axis: no fused operator, so PyTorch's."""
    attrs = Conv((1, 1), (0, 0), (0, 0), (1, 1), 1)
    types = {"src": TensorType(IMAGE), "weights": TensorType((8, 16, 2, 2))}
    node = node_of("convolution", attrs, types)
    formats = {name: MemoryDesc.any(type_.dims, "f32") for name, type_ in types.items()}
    assert [offer.impl for offer in target.candidates(node, request(node, formats))] == ["aten"]
    types = {"src": TensorType((2, 16, 20)), "weights": TensorType((8, 16, 3))}
    node = node_of("convolution", Conv.make(1), types)
    formats = {name: MemoryDesc.any(type_.dims, "f32") for name, type_ in types.items()}
    assert [offer.impl for offer in target.candidates(node, request(node, formats))] == ["aten"]


def test_opaque_sources_stay_opaque_where_the_dispatcher_has_a_kernel(target):
    node = node_of("eltwise", Eltwise("relu"), {"src": TensorType(IMAGE)})
    (offer,) = target.candidates(node, request(node, {"src": opaque(PLAIN)}))
    assert offer.impl == "aten::relu" and is_opaque(offer.results[0])
    silent = node_of("eltwise", Eltwise("swish", 1.0), {"src": TensorType(IMAGE)})
    assert list(target.candidates(silent, request(silent, {"src": opaque(PLAIN)}))) == []


def test_the_dispatcher_decides(target, monkeypatch):
    node = node_of("eltwise", Eltwise("relu"), {"src": TensorType(IMAGE)})
    monkeypatch.setattr("fmtprop.targets.mkldnn.opaque.has_kernel", lambda operator, key: False)
    assert list(target.candidates(node, request(node, {"src": opaque(PLAIN)}))) == []
    monkeypatch.setattr("fmtprop.targets.mkldnn.fused.has_kernel", lambda operator, key: False)
    fused, formats = convolution()
    assert [offer.impl for offer in target.candidates(fused, request(fused, formats))] == ["aten"]


def test_unknown_operators_have_no_kernel():
    assert not dispatcher.has_kernel("aten::from_the_future")
    assert not dispatcher.accepts_unary("mish", (), "", after_add=False)
    assert dispatcher.accepts_unary("relu", (), "", after_add=True)


def test_reorders_are_to_mkldnn_and_to_dense(target):
    node = node_of("reorder", Reorder(), {"src": TensorType(IMAGE)})
    last = channels_last(PLAIN)
    expected = {
        (PLAIN, opaque(PLAIN)): "aten::to_mkldnn",
        (opaque(PLAIN), PLAIN): "aten::to_dense",
        (opaque(PLAIN), last): "aten::to_dense, aten::copy_",
        (PLAIN, last): "aten::copy_",
    }
    for (src, dst), impl in expected.items():
        (offer,) = target.candidates(node, {"src": src, "dst": dst})
        assert offer.impl == impl
        assert (target.reorder_cost(src, dst) or 0) > 0
    blocked = MemoryDesc(IMAGE, "f32", tag="aBcd8b")
    assert list(target.candidates(node, {"src": PLAIN, "dst": blocked})) == []
    assert target.reorder_cost(PLAIN, blocked) is None and target.reorder_cost(PLAIN, PLAIN) == 0.0


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize(
    "tail",
    [
        *(
            [PostOp("eltwise", Eltwise(alg, alpha, beta))]
            for alg, alpha, beta in [
                ("relu", 0.0, 0.0), ("relu", 0.1, 0.0), ("logistic", 0.0, 0.0), ("tanh", 0.0, 0.0), ("clip", 0.0, 6.0),
                ("swish", 1.0, 0.0), ("swish", 1.7, 0.0), ("gelu_erf", 0.0, 0.0), ("gelu_tanh", 0.0, 0.0),
                ("hardswish", 1 / 6, 0.5), ("hardsigmoid", 1 / 6, 0.5), ("hardswish", 0.2, 0.5), ("mish", 0.0, 0.0),
            ]
        ),
        *([PostOp("binary", Binary(alg), "post_op_0")] for alg in ("add", "sub", "mul", "div", "max")),
        [ADD, RELU],
        [ADD, PostOp("eltwise", Eltwise("tanh")), RELU],
        [PostOp("sum", Sum((1.0,)), "post_op_0"), RELU],
        [PostOp("sum", Sum((0.5,)), "post_op_0")],
        [RELU, PostOp("binary", Binary("mul"), "post_op_1")],
    ],
    ids=lambda tail: "+".join(getattr(p.attrs, "alg", p.op) for p in tail),
)  # fmt: skip
def test_every_tail_is_what_its_reference_is(target, tail):
    node, formats = convolution(post_ops=tail)
    extra = {p.operand: MemoryDesc.any(node.results[0].dims, "f32") for p in tail if p.operand}
    node = chosen(target, node, {**formats, **extra})
    assert node.choice.impl.startswith("mkldnn::_convolution_pointwise")
    assert check_node(node) is None


def test_a_wrong_operator_is_found(target):
    node, formats = convolution()
    node = chosen(target, node, formats)
    wrong = TorchFunction(lambda *tensors: node.choice.handle.call(*tensors) + 1)
    broken = node.with_(choice=type(node.choice)("mkldnn", "mkldnn::wrong", node.choice.operands, handle=wrong))
    assert check_node(broken) is not None


@pytest.mark.parametrize("op", ["convolution", "deconvolution", "inner_product", "matmul", "pooling", "concat"])
def test_samples_agree_with_their_references(target, op):
    declaration = opdef(op)
    for sample in declaration.samples():
        node = node_of(op, sample.attrs, sample.types)
        formats = {name: MemoryDesc.any(type_.dims, type_.dtype) for name, type_ in sample.types.items()}
        offers = list(target.candidates(node, request(node, formats)))
        assert offers, sample.name
        for candidate in offers:
            formatted = node.with_(descs=candidate.results, choice=candidate.choice(sample.name))
            assert check_node(formatted) is None, (sample.name, candidate.impl)


@pytest.mark.parametrize(
    ("op", "attrs", "operands"),
    [
        *(("eltwise", Eltwise(alg), ("src",)) for alg in ("relu", "logistic", "tanh", "gelu_erf")),
        *(("binary", Binary(alg), ("src_0", "src_1")) for alg in ("add", "mul")),
        ("sum", Sum((1.0, 1.0)), ("src_0", "src_1")),
        *(
            ("pooling", Pooling.make(alg, (3, 3), 2, pad_l=1), ("src",))
            for alg in ("max", "avg_include_padding", "avg_exclude_padding")
        ),
        ("softmax", Softmax(1), ("src",)),
    ],
    ids=lambda value: getattr(value, "alg", None),
)
def test_opaque_operators_agree_with_their_references(target, op, attrs, operands):
    node = node_of(op, attrs, dict.fromkeys(operands, TensorType(IMAGE)))
    node = chosen(target, node, dict.fromkeys(operands, opaque(PLAIN)))
    assert is_opaque(node.descs[0])
    assert check_node(node) is None


# ---------------------------------------------------------------- whole graphs


@pytest.mark.parametrize(
    ("policy", "name"),
    [("plain", "chain"), ("naive", "residual"), ("propagate", "concat"), ("optimal", "conv3d"), ("optimal", "concat")],
)
def test_teaching_graphs_equal_pytorch_under_every_policy(name, policy):
    graph = fp.load(name)
    net = fp.compile(graph, target="mkldnn", policy=policy)
    assert net.plan.arena_nbytes == 0
    assert {step.target for step in net.plan.steps} == {"mkldnn"}
    assert errors(net, graph) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["bert_base", "convnext_t", "densenet121", "efficientnet_b0", "inception_v3", "mobilenet_v2", "resnet50",
     "shufflenet_v2", "unet", "vgg16", "vit_b16"],
)  # fmt: skip
def test_built_in_models_equal_pytorch(name):
    graph = fp.load(name)
    assert errors(fp.compile(graph, target="mkldnn", policy="propagate"), graph) < 1e-4


def test_bf16_equals_pytorch():
    if not dispatcher.computes_in(MemoryDesc((1,), "bf16").dtype):
        pytest.skip(f"PyTorch's oneDNN has no bf16 on this CPU ({torch.backends.cpu.get_cpu_capability()})")
    graph = fp.load("residual")
    assert errors(fp.compile(graph, target="mkldnn", dtype="bf16"), graph) < 2e-2


def test_bf16_where_there_is_none_runs_in_f32(monkeypatch):
    monkeypatch.setattr(MkldnnTarget, "computes_in", lambda self, dtype: False)
    with pytest.warns(RuntimeWarning, match="target mkldnn has no bf16 on this CPU"):
        net = fp.compile("chain", target="mkldnn", dtype="bf16")
    assert net.precision == "f32"


def test_a_residual_is_added_in_place_where_nobody_else_reads_it():
    net = fp.compile("residual", target="mkldnn", policy="propagate")
    (step,) = [s for s in net.plan.steps if ".binary" in s.node.choice.impl]
    residual = step.operands[step.node.choice.handle.residual_operand]
    assert residual.buffer == step.results[0].buffer
    inputs = net.random_inputs()
    first = net.run_flat(inputs)[0].clone()
    assert torch.equal(first, net.run_flat(inputs)[0])


def test_activation_reorders_are_reported_and_weights_packed_once():
    net = fp.compile("residual", target="mkldnn", policy="propagate")
    report = net.report(repeats=1)
    assert [(row.src, row.dst) for row in report.reorders] == [("f32:abcd", "f32:acdb"), ("f32:acdb", "f32:abcd")]
    assert len(report.packed) == 3
    assert "inside PyTorch" in report.machine["onednn"]
    assert report.memory["arena"] == 0 < report.memory["peak"]


@pytest.mark.parametrize("budget", [None, 1e-9], ids=["unlimited", "spent at once"])
def test_optimal_with_measured_costs(budget):
    seen = []
    net = fp.compile(
        "residual", target="mkldnn", policy="optimal", tune="remeasure", tune_budget=budget,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    total = seen[-1][1]
    assert seen[-1] == (total, total) and total > 1, "progress ends before its end"
    assert net.certificate.optimal
    assert errors(net, fp.load("residual")) < 1e-4


@pytest.mark.usefixtures("own_cache")
def test_measured_costs_are_stored():
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Sigmoid())
    x = torch.randn(1, 8, 20, 20)
    first = fp.compile(module, x, target="mkldnn", tune="measure")
    assert first.tuning.measured > 0
    again = fp.compile(module, x, target="mkldnn", tune="measure")
    assert again.tuning.measured == 0 < again.tuning.cached
    for net in (first, again):
        torch.testing.assert_close(net(x), module(x))


@pytest.mark.usefixtures("own_cache", "only_verdicts")
def test_optimal_converts_to_mkldnn_tensors_where_that_pays(monkeypatch):
    """It never did by the costs that were measured: their operators are as fast on dense tensors."""
    modelled = MkldnnCosts.node

    def cheap_on_mkldnn_tensors(self, node, candidate):
        return modelled(self, node, candidate) * (0.1 if candidate.results[0].kind == "opaque" else 20.0)

    monkeypatch.setattr(MkldnnCosts, "node", cheap_on_mkldnn_tensors)
    module, x = torch.nn.Sequential(torch.nn.MaxPool2d(2), torch.nn.Sigmoid()).eval(), torch.randn(1, 16, 64, 64)
    net = fp.compile(module, x, target="mkldnn", policy="optimal", tune="model", confirm=False)
    impls = [step.node.choice.impl for step in net.plan.steps]
    assert impls[0] == "aten::to_mkldnn" and impls[-1] == "aten::to_dense"
    torch.testing.assert_close(net(x), module(x))
    raced = fp.compile(module, x, target="mkldnn", policy="optimal")
    if raced.race is None:  # what runs teach may correct the costs before; then there is nothing to promise
        assert [step.node.choice.impl for step in raced.plan.steps] == ["aten"]
    else:
        assert raced.race.names == ("optimal", "propagate"), "a promise by cost is tried"
    assert fp.compile(module, x, target="mkldnn", policy="optimal").race is None, "the verdict is known"
    torch.testing.assert_close(raced(x), module(x))


def test_a_depthwise_convolution_is_no_post_op_here():
    """Two convolutions in one are an alternative of the library's; here it would be PyTorch's own, packing weights."""
    module = torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 1), torch.nn.ReLU6(), torch.nn.Conv2d(32, 32, 3, padding=1, groups=32)
    )
    net = fp.compile(module, torch.randn(1, 16, 12, 12), target="mkldnn", policy="optimal")
    impls = [step.node.choice.impl for step in net.plan.steps if step.node.op == "convolution"]
    assert impls == ["mkldnn::_convolution_pointwise+hardtanh", "mkldnn::_convolution_pointwise"]


def test_costs_are_positive_and_known_for_all_that_is_offered(target):
    node, formats = convolution()
    costs = target.model()
    offers = list(target.candidates(node, request(node, formats)))
    assert offers
    assert all(costs.node(node, offer) > 0 for offer in offers)
    assert costs.reorder(PLAIN, opaque(PLAIN)) > costs.reorder(PLAIN, PLAIN) == 0.0


def test_out_threads_autocast_and_copies():
    net = fp.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.ones(2, 8), target="mkldnn")
    assert {step.target for step in net.plan.steps} == {"mkldnn"}
    x, y = torch.randn(2, 8), torch.empty(2, 8)
    expected = net(x)
    assert net(x, out=y) is y and torch.equal(y, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype is torch.float32
    with net.throughput(streams=2) as pool:
        assert all(torch.equal(result, expected) for result in pool.map([x, x, x]))
    assert not net(x.requires_grad_()).requires_grad


def test_an_input_that_is_the_output_is_not_handed_back():
    net = fp.compile(torch.nn.Identity(), torch.ones(2, 3), target="mkldnn")
    x = torch.randn(2, 3)
    assert torch.equal(net(x), x) and net(x).data_ptr() != x.data_ptr()


def test_parameters_are_taken_as_they_are():
    module = torch.nn.Conv2d(3, 8, 3)
    x = torch.randn(1, 3, 8, 8)
    net = fp.compile(module, x, target="mkldnn")
    assert {step.target for step in net.plan.steps} == {"mkldnn"}
    before = net(x)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    assert torch.equal(net(x), before)


# ---------------------------------------------------------------- mkldnn tensors at the boundary


def test_an_mkldnn_input_is_taken_as_it_is_or_converted():
    module = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Sigmoid())
    x = torch.randn(1, 16, 8, 8)
    blocked = MemoryDesc(x.shape, "f32", tag="aBcd8b")
    net = fp.compile(module, x, target="mkldnn", policy="propagate", boundary={"input": blocked})
    impls = [step.node.choice.impl for step in net.plan.steps]
    assert impls == ["aten::relu", "aten::mkldnn_max_pool2d, aten::sigmoid", "aten::to_dense"]
    for given in (x.to_mkldnn(), x):
        assert torch.allclose(net(given), module(x))
    plain = fp.compile(module, x, target="mkldnn")
    assert torch.allclose(plain(x.to_mkldnn()), module(x))


def test_an_input_of_another_shape_is_refused():
    net = fp.compile(torch.nn.ReLU(), torch.ones(1, 4, 2, 2), target="mkldnn")
    with pytest.raises(InputError, match=r"input input has shape \(1, 4, 3, 3\)"):
        net(torch.ones(1, 4, 3, 3).to_mkldnn())


def test_unknown_targets_are_refused():
    with pytest.raises(UnsupportedOpError, match="'target' parameter of compile must be one of 'onednn', 'mkldnn'"):
        fp.compile("chain", target="gpu")


@pytest.mark.usefixtures("own_cache")
def test_a_plan_goes_around_an_operator_that_fails_its_check(monkeypatch):
    real = check_steps

    def check(steps, *rest):
        wrong = [step.node for step in steps if step.node.choice.impl == "mkldnn::_convolution_pointwise+relu"]
        return [Mismatch(node, 1.0, "it") for node in wrong] or real(steps, *rest)

    monkeypatch.setattr("fmtprop.compiling.compilation.check_steps", check)
    with pytest.warns(RuntimeWarning, match=r"node .* is off by 1.0e\+00 relative; .*; planning around it"):
        net = fp.compile("chain", target="mkldnn")
    assert "mkldnn::_convolution_pointwise+relu" not in {step.node.choice.impl for step in net.plan.steps}
    assert errors(net, fp.load("chain")) < 1e-4
