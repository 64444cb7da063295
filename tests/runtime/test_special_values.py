"""NaN and infinities: what loses which is declared, and special_values="exact" gives PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.api import Options, compile_graph
from fmtprop.compiling.stages import normalise
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.op import OPSET, OpDef, Sample
from fmtprop.ir.ports import result_names
from fmtprop.ir.types import TensorType
from fmtprop.jit import unavailable
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Conv, emit
from fmtprop.ops.eltwise import Eltwise
from fmtprop.passes.assignment.formats import channel_blocked, channels_last, plain, unspecified
from fmtprop.passes.optimal import OptimalFormats, expansions
from fmtprop.passes.target import Setting
from fmtprop.runtime.agreement import relative_error, small_numbers
from fmtprop.runtime.constants import run_once
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.targets.bound import MovableMemory, Place
from fmtprop.targets.executable import threads_here
from fmtprop.targets.memory import aligned_bytes
from fmtprop.targets.mkldnn import MkldnnTarget
from fmtprop.targets.pytorch import call_reference
from tests.modules import Function
from tests.runtime.checks import numbers
from tests.runtime.test_nan import EXCEPTIONS, FAITHFUL
from tests.targets.nodes import node_of, request

INF = torch.inf

#: what stands at each seventh place of a source, or at all of them
SPECIAL = {"nan": (7, torch.nan), "inf": (7, INF), "-inf": (7, -INF), "all inf": (1, INF), "all -inf": (1, -INF)}


# ---------------------------------------------------------------- the declarations


def samples() -> list[object]:
    found = []
    for declaration in OPSET.values():
        if declaration.primitive is not None and declaration.name != "reorder":
            # not those of which another call makes an operand, such as a workspace
            known = [s for s in declaration.samples() if declaration.numbers.checkable(s.attrs)]
            found += [pytest.param(declaration, s, id=f"{declaration.name}-{s.name}") for s in known]
    return found


def chosen_ways(declaration: OpDef, sample, post_ops: Sequence[PostOp] = ()) -> Iterator[Node]:
    """Yield a sample's node in each implementation, in several formats."""
    node, seen = node_of(declaration.name, sample.attrs, sample.types, post_ops), set()
    for lie in (unspecified, plain, channels_last, partial(channel_blocked, block=16)):
        formats = {}
        for name, type_ in sample.types.items():
            desc = MemoryDesc(type_.dims, type_.dtype)
            is_source = name.startswith(("src", "dst", "diff_dst"))
            formats[name] = lie(desc) if is_source else desc if desc.ndim < 2 else MemoryDesc.any(desc.dims, desc.dtype)
        if declaration.name.endswith("_normalization") and any(d.kind == "any" for d in formats.values()):
            continue
        for candidate in OneDnnTarget().candidates(node, request(node, formats)):
            key = candidate.impl, tuple(candidate.operands.values()), candidate.results
            if key not in seen and not candidate.is_ref:
                seen.add(key)
                yield node.with_(descs=candidate.results, choice=candidate.choice("test"))


def poisoned_numbers(special, node, name, desc):
    """Return the numbers of a check, some of a source's being special."""
    if name == "variance" and node.op == "layer_normalization_backward":
        # finite statistics of a row that is not would be no statistics of it
        return poisoned_numbers(special, node, "src", node.choice.operands["src"]).var(-1, unbiased=False)
    numbers = small_numbers(node, name, desc).clone()
    if name in ("src", "src_0", "dst"):
        step, value = special
        numbers.view(-1)[::step] = value
    return numbers


def computed(node: Node, operands: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the results of a node's kernel; None for a workspace."""
    places, residual = {}, node.choice.handle.residual(node)
    executable = node.choice.handle.build(threads_here())
    for name, desc in node.choice.operands.items():
        if desc.kind == "blocked":
            flat = torch.from_numpy(fp.pack(operands[name].numpy(), desc)).view(torch.uint8)
        else:
            flat = executable.lay_out(node, name, operands[name].contiguous())
        places[name] = Place(MovableMemory(flat), desc)
    for name, desc in zip(result_names(node), node.descs, strict=True):
        places[name] = Place(places[residual].memory if residual else MovableMemory(aligned_bytes(desc.nbytes)), desc)
    run_once(node, executable, places)
    return [
        None if desc.is_workspace else torch.from_numpy(fp.unpack(numbers(places[name]).flatten().numpy(), desc).copy())
        for name, desc in zip(result_names(node), node.descs, strict=True)
    ]


@pytest.mark.parametrize(("declaration", "sample"), samples())
def test_what_loses_special_values_is_declared(declaration, sample):
    lost: dict[str, set[str]] = {}
    for node, (kind, special) in product(chosen_ways(declaration, sample), SPECIAL.items()):
        operands = {name: poisoned_numbers(special, node, name, desc) for name, desc in node.choice.operands.items()}
        pairs = zip(computed(node, operands), call_reference(node, operands), strict=True)
        if INF in (relative_error(got, wanted) for got, wanted in pairs if got is not None):  # not a workspace
            lost.setdefault("nan" if kind == "nan" else "inf", set()).add(node.choice.impl)
    declared = {"inf" if name == "extremum" else name for name in declaration.numbers.loses(sample.attrs)}
    assert lost.keys() <= declared, lost


def products() -> list[object]:
    kinds = ("convolution", "deconvolution", "inner_product", "matmul")
    return [
        one for one in samples() if one.values[0].name in kinds and one.values[1].types["src"].dtype is DataType.F32
    ]


@pytest.mark.parametrize(("declaration", "sample"), products())
def test_a_sigmoid_behind_products_keeps_nan(declaration, sample):
    """oneDNN's plain code makes 0 of it, which ends implementations that a plan on a busy machine may choose."""
    for node in chosen_ways(declaration, sample, [PostOp("eltwise", Eltwise("logistic"))]):
        operands = {name: poisoned_numbers((7, torch.nan), node, name, d) for name, d in node.choice.operands.items()}
        (got,), (wanted,) = computed(node, operands), call_reference(node, operands)
        assert torch.equal(got.isnan(), wanted.isnan()), node.choice.impl


# ---------------------------------------------------------------- exact


MAXIMA = {
    "max_pool": nn.MaxPool2d(2),
    "padded max_pool": nn.MaxPool2d(3, 2, 1),
    "amax": Function(lambda x: x.amax((2, 3))),
    "amin": Function(lambda x: x.amin(1)),
    "max of rows": Function(lambda x: x.max(-1).values),
}
OTHERS = {
    "softmax": nn.Softmax(-1),
    "log_softmax": nn.LogSoftmax(1),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "lrn": nn.LocalResponseNorm(3),
    "conv + relu": nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
    "conv + clamp + conv": nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU6(), nn.Conv2d(8, 8, 3)),
    "linear + gelu": nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    "maximum": Function(lambda x: torch.maximum(x, x.flip(-1))),
    "clamp_min": Function(lambda x: x.clamp_min(0.5)),
    "pow": Function(lambda x: x.abs().pow(1.5)),
    "cube": Function(lambda x: x.pow(3)),
}
MODELS = {**FAITHFUL, **{name: module for name, (module, _) in EXCEPTIONS.items()}, **MAXIMA, **OTHERS}


def poisoned_inputs() -> Iterator[torch.Tensor]:
    for step, value in SPECIAL.values():
        x = torch.randn(1, 8, 4, 8, generator=torch.Generator().manual_seed(0))
        x.view(-1)[:: 1 if step == 1 else 37] = value
        yield x


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert relative_error(got, expected) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_exact_is_as_pytorch(name):
    module = MODELS[name].eval()
    graph = fp.from_torch(module, next(poisoned_inputs()))
    options = {"tune": "model", "confirm": False, "special_values": "exact"}
    nets = [fp.compile(graph, policy=policy, **options) for policy in ("optimal", "propagate")]
    for x in poisoned_inputs():
        with torch.no_grad():
            expected = module(x)
            for net in nets:
                assert_same(net(x), expected)


@pytest.mark.parametrize("name", MAXIMA)
@pytest.mark.parametrize("value", [-INF, INF])
def test_extrema_of_infinities_are_infinite(name, value):
    module, x = MAXIMA[name], torch.full((1, 8, 4, 8), value)
    assert torch.equal(fp.compile(module, x, tune="model", confirm=False)(x), module(x))


def test_a_masked_row_has_no_largest_element():
    def masked(x):
        return torch.where(x > 0, x, -INF).amax(-1)

    x = -torch.rand(4, 33)
    net = fp.compile(Function(masked), x)
    assert torch.equal(net(x), torch.full((4,), -INF))


def test_maxima_behind_weights_stay_onednns():
    module, x = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)), torch.randn(1, 8, 14, 14)
    net = fp.compile(module, x, tune="model", confirm=False)
    assert {step.target for step in net.plan.steps if step.node.op == "pooling"} == {"onednn"}


def test_no_convolution_is_filtered_or_merged_with_others_where_it_is_exact():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(32, 32, 3), nn.Conv2d(32, 64, 3, groups=16)).eval()
    normal, _ = normalise(fp.from_torch(module, torch.randn(1, 32, 32, 32)), special_values="exact")
    solver = OptimalFormats(Setting(OneDnnTarget(), ReferenceTarget()), MkldnnTarget().model())
    assert expansions(normal, solver) == {}


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6()])
def test_an_exact_relu_runs_behind_its_convolution(act):
    module, x = nn.Sequential(nn.Conv2d(8, 16, 3), act, nn.Conv2d(16, 16, 3)).eval(), torch.randn(1, 8, 14, 14)
    net = fp.compile(module, x, tune="model", confirm=False, special_values="exact")
    assert {step.target for step in net.plan.steps} == {"onednn"}
    x[0, 3, 5, 5] = torch.nan
    assert_same(net(x), module(x))


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_values_of_hidden_keys_make_nan_where_attention_is_exact():
    class Step(nn.Module):
        def forward(self, q, k, v, mask):
            return torch.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v

    q, k, v, mask = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 256, 32), torch.randn(1, 2, 256, 32), torch.zeros(256)
    mask[100:], v[:, :, 200] = -torch.inf, torch.nan
    inputs = (q, k, v, mask[None, None, None])
    net = fp.compile(Step(), inputs, tune="model", confirm=False, special_values="exact")
    assert [step.node.op for step in net.plan.steps] == ["attention"]
    assert Step()(*inputs).isnan().all() and net(*inputs).isnan().all()


def test_exact_is_refused_where_it_is_not_known():
    x = torch.ones(3)
    with pytest.raises(fp.UnsupportedOpError, match=r"special_values='exact' needs target='onednn'"):
        fp.compile(nn.ReLU(), x, special_values="exact", target="mkldnn")
    with pytest.raises(fp.UnsupportedOpError, match=r"'special_values' parameter .* one of 'fast', 'kept', 'exact'"):
        fp.compile(nn.ReLU(), x, special_values="slow")


# ---------------------------------------------------------------- as post-ops


def functions() -> list[object]:
    found = []
    for declaration in OPSET.values():
        if declaration.as_post_op is not None and (declaration.elementwise or declaration.as_post_op.kind == "prelu"):
            images = [s for s in declaration.samples() if s.types[_first(s)].dims == (2, 17, 5, 7)]
            found += [pytest.param(declaration, s, id=f"{declaration.name}-{s.name}") for s in images]
    return found


def _first(sample: Sample) -> str:
    return next(iter(sample.types))


@pytest.mark.parametrize(("declaration", "sample"), functions())
def test_what_loses_special_values_as_a_post_op_is_declared(declaration: OpDef, sample: Sample) -> None:
    graph, first, images = Graph("behind"), _first(sample), sample.types[_first(sample)]
    ones = TensorType((images.dims[1], 1, 1, 1, 1))
    weights = graph.constant("ones", ones, torch.ones(ones.dims))
    # it passes each number on, so that the op may become its post-op
    attrs = Conv.make(2, groups=images.dims[1])
    conv = emit(graph, "convolution", {"src": graph.input("x", images), "weights": weights}, attrs)
    inputs = {name: graph.input(name, type_) for name, type_ in sample.types.items() if name != first}
    graph.output(emit(graph, declaration.name, {first: conv, **inputs}, sample.attrs))
    net = compile_graph(graph, Options(special_values="exact", policy="propagate"))
    generator = torch.Generator().manual_seed(0)
    for kind, (step, value) in SPECIAL.items():
        given = [torch.rand(type_.dims, generator=generator) + 0.5 for type_ in sample.types.values()]
        given[0].view(-1)[::step] = value
        # in f64, since PyTorch has two kinds of GELU in f32
        expected = declaration.reference(
            sample.attrs, {n: x.double() for n, x in zip(sample.types, given, strict=True)}
        )
        for got, wanted in zip(net.run_flat(given), expected, strict=True):
            assert relative_error(got, wanted) < 1e-4, (kind, [step.node.choice for step in net.plan.steps])
