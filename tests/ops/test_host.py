from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import fmtprop as fp
from fmtprop.errors import GraphError, UnsupportedOpError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.ops import HostCall, emit, host
from fmtprop.ops.host import ATEN, make_host_call
from fmtprop.ops.host_call import Parts, host_call
from fmtprop.ops.host_facts import ANY_STRIDES
from tests.ops.fake_call import FakeCall, random_tensor

X = TensorType((2, 6, 4, 5))


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        ("aten.cumsum.default", (X, -1), {}),
        ("aten.sort.default", (X, 1, True), {}),
        ("aten.argmax.default", (X, 1), {}),
        ("aten.bitwise_not.default", (TensorType((3,), "boolean"),), {}),
        ("aten._to_copy.default", (X,), {"dtype": torch.int64, "memory_format": torch.channels_last}),
        ("aten.full_like.default", (X, math.inf), {"device": "cpu", "layout": torch.strided}),
        ("aten.masked_fill.Scalar", (X, TensorType((5,), "boolean"), -math.inf), {}),
        ("aten.clamp.default", (X,), {"max": 0.25}),
        ("aten.einsum.default", ("nchw,nchw->nc", [X, X]), {}),
        ("aten.index.Tensor", (X, [None, TensorType((3,), "s64")]), {}),
        ("aten.var_mean.correction", (X, [1]), {"correction": 0}),
        ("aten.unbind.int", (X,), {}),
        ("aten.dropout.default", (X, 0.5, False), {}),
        ("aten.scaled_dot_product_attention.default", (X, X, X), {}),
        ("prims.convert_element_type.default", (X, torch.float64), {}),
    ],
)
def test_a_call_gives_what_torch_gives(target, args, kwargs):
    call = FakeCall(target, *args, **kwargs)
    values = make_host_call(call)
    node = call.graph.node(values[0].node)
    assert node.results == call.results
    operands = {name: random_tensor(call.type(v)) for name, v in call.graph.inputs(node.name).items()}
    results = ATEN.reference(node.attrs, operands)
    assert len(values) == len(results)

    feed = iter(operands.values())
    args = tree_map_only(TensorType, lambda _: next(feed), args)
    namespace, name, overload = target.split(".")
    expected = getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args, **kwargs)
    for mine, theirs in zip(results, expected if isinstance(expected, (list, tuple)) else [expected], strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_results_of_one_node_are_numbered():
    call = FakeCall("aten.topk.default", X, 2)
    values, indices = make_host_call(call)
    assert (values.index, indices.index) == (0, 1)
    assert call.type(indices) == TensorType((2, 6, 4, 2), "s64")


def test_arguments_at_their_default_are_left_out_and_json_is_strict():
    attrs, inputs = host_call(
        "aten.full_like.default",
        {"self": Value("x"), "fill_value": -math.inf, "dtype": DataType.BF16, "layout": None, "device": "cpu"},
    )
    text = attrs.arguments
    assert json.loads(text, parse_constant=pytest.fail) == {
        "self": {"tensor": "src_0"},
        "fill_value": {"float": "-inf"},
        "dtype": "bf16",
        "device": "cpu",
    }
    assert inputs == {"src_0": Value("x")}
    assert HostCall.from_json(attrs.to_json()) == attrs


def test_true_is_not_one():
    # sum's keepdim defaults to False; 0 would compare equal to it, and 1 to True
    attrs, _ = host_call("aten.sum.dim_IntList", {"self": Value("x"), "dim": [1], "keepdim": True})
    assert json.loads(attrs.arguments)["keepdim"] is True


def test_a_call_without_tensors():
    graph = Graph()
    attrs, inputs = host_call("aten.arange.default", {"end": 5, "dtype": DataType.F32})
    value = emit(graph, "aten", inputs, attrs)
    assert graph.type_of(value) == TensorType((5,))
    assert ATEN.reference(attrs, {})[0].tolist() == [0, 1, 2, 3, 4]


def test_as_strided_counts_from_the_tensor_and_not_from_the_arena():
    attrs, _ = host_call(
        "aten.as_strided.default", {"self": Value("x"), "size": [2], "stride": [2], "storage_offset": 1}
    )
    arena = torch.arange(10.0)
    (result,) = ATEN.reference(attrs, {"src_0": arena[4:8]})
    assert result.tolist() == [5, 7]


@pytest.mark.parametrize("operand", [torch.randn(4, 3).t(), torch.randn(25)[1:].view(2, 3, 4)])
def test_a_view_as_wider_elements_takes_any_operand(operand):
    attrs, _ = host_call("aten.view.dtype", {"self": Value("x"), "dtype": DataType.S64})
    (result,) = ATEN.reference(attrs, {"src_0": operand})
    assert torch.equal(result, operand.clone(memory_format=torch.contiguous_format).view(torch.int64))


REFUSED = [
    ("aten.from_file.default", {"filename": "/etc/passwd", "size": 1}, "only functions of tensors can"),
    ("aten.cumsum.__class__", {}, "has no overload aten.cumsum.__class__"),
    ("aten.__dict__.get", {}, "has no overload aten.__dict__.get"),
    ("aten.cumsum.overloads", {}, "has no overload aten.cumsum.overloads"),
    ("load_library.x.default", {}, "import the library that registers load_library first"),
    ("nobody.twice.default", {}, "nobody.twice.default; import the library that registers nobody first"),
    ("aten.save.default", {"item": 1, "filename": "x"}, "it is not a function that returns tensors"),
    ("aten.item.default", {"self": Value("x")}, "it is not a function that returns tensors"),
    ("aten.add_.Tensor", {"self": Value("x"), "other": 1}, "changes its arguments in place"),
    ("aten.no_such_thing.default", {}, "has no overload aten.no_such_thing.default"),
    ("aten.rand_like.default", {"self": Value("x")}, "draws random numbers"),
    ("aten.dropout.default", {"input": Value("x"), "p": 0.5, "train": True}, "draws random numbers.*eval mode"),
    ("aten.native_dropout.default", {"input": Value("x"), "p": 0.5, "train": None}, "draws random numbers"),
    ("aten.nonzero.default", {"self": Value("x")}, "nonzero.default: the shape of a result depends on the data"),
    ("aten.full_like.default", {"self": Value("x"), "fill_value": 0, "device": "cuda"}, "asks for device 'cuda'"),
    ("aten.view.default", {"self": Value("x"), "size": [7]}, "aten.view.default does not take src_0 f32"),
    (
        "aten.mul.Tensor",
        {"self": Value("x"), "other": complex("nanj")},
        "argument other is nanj .complex., which a graph cannot hold",
    ),
    (
        "aten.batch_norm.default",
        {
            "input": Value("x"), "weight": None, "bias": None, "running_mean": Value("m"), "running_var": Value("m"),
            "training": True, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False,
        },
        "updates running statistics; export the model in eval mode",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("target", "arguments", "message"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_calls_say_why(target, arguments, message):
    graph = Graph()
    graph.input("x", X)
    graph.input("m", TensorType((6,)))
    with pytest.raises(UnsupportedOpError, match=message):
        attrs, inputs = host_call(target, arguments)
        emit(graph, "aten", inputs, attrs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{", "arguments: line 1, column 2: is not JSON"),
        ("[]", "arguments must be a JSON object"),
        ('{"self": {"tensor": "src_0"}}', "argument 'dim' is missing"),
        ('{"self": {"tensor": "src_0"}, "dim": 0, "axis": 1}', "has no argument 'axis'"),
        ('{"self": {"tensor": "src_1"}, "dim": 0}', "reads operand src_1, which is not connected"),
        ('{"self": {"file": "x"}, "dim": 0}', "is neither a tensor nor a number"),
    ],
)
def test_a_damaged_graph_file_is_named(arguments, message):
    graph = Graph()
    x = graph.input("x", X)
    with pytest.raises(GraphError, match=message):
        emit(graph, "aten", {"src_0": x}, HostCall("aten.cumsum.default", arguments))


def test_a_file_names_pytorchs_own_functions_only():
    call = HostCall("nobody.twice.default", "{}")
    with pytest.raises(
        UnsupportedOpError, match="only functions of tensors in the namespaces aten, prims, torchvision"
    ):
        HostCall.from_json(call.to_json())


def test_unknown_memory_format():
    graph = Graph()
    attrs = HostCall("aten.clone.default", '{"self": {"tensor": "src_0"}, "memory_format": "strided"}')
    with pytest.raises(GraphError, match="'strided' is not a memory_format"):
        emit(graph, "aten", {"src_0": graph.input("x", X)}, attrs)


def test_hostile_reference_is_checked_without_inference():
    attrs = HostCall("aten.save.default", '{"item": 1, "filename": "x"}')
    with pytest.raises(UnsupportedOpError, match="not a function that returns tensors"):
        ATEN.reference(attrs, {})


def test_samples_infer_what_their_reference_gives():
    for sample in ATEN.samples():
        results = ATEN.infer(sample.attrs, sample.types)
        tensors = ATEN.reference(sample.attrs, {name: random_tensor(t) for name, t in sample.types.items()})
        assert [r.dims for r in results] == [tuple(t.shape) for t in tensors]


def test_the_types_of_a_call_are_inferred_once(monkeypatch):
    asked, make_call = [], host.make_call
    monkeypatch.setattr(host, "make_call", lambda attrs, *rest: asked.append(attrs) or make_call(attrs, *rest))
    call = HostCall("aten.cumsum.default", '{"self": {"tensor": "src_0"}, "dim": 1}')
    counts = []
    for dims in ((3, 17), (3, 17), (5, 17), (3, 17)):
        assert ATEN.infer(call, {"src_0": TensorType(dims)}) == (TensorType(dims),)
        counts.append(len(asked))
    assert counts == [1, 1, 2, 2]


def test_types_are_inferred_without_pytorchs_compiler():
    code = """
import sys
from fmtprop.ir.types import TensorType
from fmtprop.ops import HostCall
from fmtprop.ops.host import ATEN
call = HostCall("aten.embedding.default", '{"weight": {"tensor": "src_0"}, "indices": {"tensor": "src_1"}}')
(result,) = ATEN.infer(call, {"src_0": TensorType((9, 4)), "src_1": TensorType((2, 3), "s64")})
print(result, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["f32[2,3,4]", "False"]


def test_what_names_a_device_or_has_no_tensor_makes_no_data():
    calls = [
        ("aten.zeros.default", '{"size": [1000000, 1000000]}', {}),
        (
            "aten.zeros_like.default",
            '{"self": {"tensor": "src_0"}, "device": "cpu"}',
            {"src_0": TensorType((10**6, 10**6))},
        ),
    ]
    for target, arguments, types in calls:
        assert ATEN.infer(HostCall(target, arguments), types) == (TensorType((10**6, 10**6)),)


def _format(x: torch.Tensor) -> torch.memory_format:
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def _max_pool_backward(x: torch.Tensor, *window: list[int]) -> torch.Tensor:
    aten = torch.ops.aten
    values, indices = aten.max_pool2d_with_indices(x, *window)
    # indices of the other memory format, as a plan may give them
    indices = indices.contiguous(memory_format=torch.channels_last if x.is_contiguous() else torch.contiguous_format)
    return aten.max_pool2d_with_indices_backward(values.nan_to_num(), x, *window, [1, 1], False, indices)


def _upsample_backward(x: torch.Tensor, name: str, *how: bool) -> torch.Tensor:
    gradient = getattr(torch.ops.aten, f"upsample_{name}2d_backward")
    return gradient(x, [31, 29], [*x.shape[:2], 17, 12], *how)


CHANNELS_LAST = {
    "aten.max_pool2d_with_indices.default": (
        lambda x: torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    ),
    "aten.avg_pool2d.default": (lambda x: torch.ops.aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1], True)),
    "aten.adaptive_max_pool2d.default": (lambda x: torch.ops.aten.adaptive_max_pool2d(x, [6, 4])),
    "aten.adaptive_avg_pool2d.default": (lambda x: torch.ops.aten.adaptive_avg_pool2d(x, [6, 4])),
    "aten.max_pool2d_with_indices_backward.default": lambda x: _max_pool_backward(x, [3, 3], [2, 2], [1, 1]),
    "aten.avg_pool2d_backward.default": (
        lambda x: torch.ops.aten.avg_pool2d_backward(
            x[..., ::2, ::2].contiguous(memory_format=_format(x)), x, [3, 3], [2, 2], [1, 1], False, True, None
        )
    ),
    "aten._adaptive_avg_pool2d_backward.default": (
        lambda x: torch.ops.aten._adaptive_avg_pool2d_backward(x[..., :6, :4].contiguous(memory_format=_format(x)), x)
    ),
    "aten.upsample_nearest2d.vec": (lambda x: torch.ops.aten.upsample_nearest2d(x, [41, 40], None)),
    "aten.upsample_bilinear2d.vec": (lambda x: torch.ops.aten.upsample_bilinear2d(x, [41, 40], True, None)),
    "aten.upsample_bicubic2d.vec": (lambda x: torch.ops.aten.upsample_bicubic2d(x, [41, 40], False, None)),
    "aten.upsample_nearest2d_backward.default": lambda x: _upsample_backward(x, "nearest"),
    "aten.upsample_bilinear2d_backward.default": lambda x: _upsample_backward(x, "bilinear", False),
}


@pytest.mark.parametrize("channels", [1, 3, 17, 32])
@pytest.mark.parametrize("target", CHANNELS_LAST)
def test_kernels_for_channels_last_are_right(target, channels):
    x = (torch.randn(2, channels, 31, 29) * 4).round() / 2  # with equal numbers in a window
    x[0, 0, 4, 5] = torch.nan
    row, last = (CHANNELS_LAST[target](y) for y in (x, x.contiguous(memory_format=torch.channels_last)))
    torch.testing.assert_close(last, row, equal_nan=True)


def test_what_may_have_any_strides_is_compared_above():
    compared = {name.split(".")[1].lstrip("_") for name in CHANNELS_LAST}
    assert {name.split(".")[1].lstrip("_") for name in ANY_STRIDES} == compared


LARGE, SMALL = (2, 32, 12, 12), (2, 32, 6, 6)
#: arguments; a tuple is the shape of a tensor
WRITTEN = {
    "aten.max_pool2d_with_indices.default": {"self": LARGE, "kernel_size": [2, 2]},
    "aten.avg_pool2d.default": {"self": LARGE, "kernel_size": [2, 2]},
    "aten.adaptive_max_pool2d.default": {"self": LARGE, "output_size": [5, 5]},
    "aten.adaptive_avg_pool2d.default": {"self": LARGE, "output_size": [5, 5]},
    "aten.upsample_nearest2d.default": {"self": LARGE, "output_size": [24, 24]},
    "aten.upsample_bilinear2d.default": {"self": LARGE, "output_size": [24, 24], "align_corners": False},
    "aten.upsample_bicubic2d.default": {"self": LARGE, "output_size": [24, 24], "align_corners": False},
    "aten.max_pool2d_with_indices_backward.default": {
        **{"grad_output": SMALL, "self": LARGE, "kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0]},
        **{"dilation": [1, 1], "ceil_mode": False, "indices": SMALL},
    },
    "aten.avg_pool2d_backward.default": {
        **{"grad_output": SMALL, "self": LARGE, "kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0]},
        **{"ceil_mode": False, "count_include_pad": True, "divisor_override": None},
    },
    **{
        f"aten.upsample_{name}2d_backward.default": {"grad_output": LARGE, "output_size": [12, 12], "input_size": SMALL}
        | ({} if name == "nearest" else {"align_corners": False})
        for name in ("nearest", "bilinear")
    },
}


@pytest.mark.parametrize("target", WRITTEN)
@pytest.mark.parametrize("source", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("result", [torch.contiguous_format, torch.channels_last])
def test_an_operator_leaves_the_strides_of_given_memory(target, source, result):
    given = WRITTEN[target]
    names = [name for name, value in given.items() if isinstance(value, tuple) and name != "input_size"]
    sources = {name: f"src_{index}" for index, name in enumerate(names)}
    attrs = HostCall(target, json.dumps({**given, **{name: {"tensor": src} for name, src in sources.items()}}))
    tensors = {src: torch.randn(given[name]).contiguous(memory_format=source) for name, src in sources.items()}
    if "indices" in sources:
        tensors[sources["indices"]] = (tensors[sources["indices"]].abs() * 20).long()
    expected = host.reference(attrs, tensors)
    places = [torch.empty_like(value).contiguous(memory_format=result) for value in expected]
    strides = [place.stride() for place in places]
    call = host.operator(attrs, tensors, places)
    call()
    assert [place.stride() for place in places] == strides
    torch.testing.assert_close(tuple(places), expected)


ROWS = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
#: arguments; a tensor is an operand
BOUND = {
    "aten.sort.default": {"self": ROWS},
    "aten.topk.default": {"self": ROWS, "k": 3},
    "aten.median.dim": {"self": ROWS, "dim": 1},
    "aten.max.dim": {"self": ROWS, "dim": 1},
    "aten.argsort.default": {"self": ROWS},
    "aten.roll.default": {"self": ROWS, "shifts": [2], "dims": [1]},
    "aten.adaptive_max_pool2d.default": {"self": ROWS.view(1, 4, 3, 3), "output_size": [2, 2]},
    "aten.upsample_nearest2d.vec": {"input": ROWS.view(1, 4, 3, 3), "output_size": [5, 6], "scale_factors": None},
    "aten.gt.Scalar": {"self": ROWS, "other": 0.1},
    "aten._to_copy.default": {"self": ROWS, "dtype": "bf16"},
    "aten.to.dtype": {"self": ROWS, "dtype": "f64"},
}


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("target", BOUND)
def test_a_call_is_made_by_pytorchs_binding(target, read, monkeypatch):
    # an overload takes twice the time, and the sum of many small calls is a model's time
    given = BOUND[target]
    (name, src), *_ = given.items()
    attrs = HostCall(target, json.dumps({**given, name: {"tensor": "src_0"}}))
    expected = list(host.reference(attrs, {"src_0": src}))
    places = [torch.full_like(value, 7) for value in expected]
    if len(places) > 1:
        places[1 - read] = expected[1 - read] = None
    call = host.operator(attrs, {"src_0": src}, places)
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", lambda *_, **__: pytest.fail("an overload was called"))
    for _ in range(2):
        call()
    assert all(place is None or torch.equal(place, value) for place, value in zip(places, expected, strict=True))


@pytest.mark.parametrize("number", [3, -2, 0, 0.3, 1e300, 300, 1 << 40, math.nan, True])
@pytest.mark.parametrize("dims", [(3, 7), ()])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "s64", "u8", "boolean"])
def test_a_number_is_what_pytorch_takes_it_for(dtype, dims, number):
    x = random_tensor(TensorType(dims, dtype))
    for name in ("mul.Tensor", "div.Tensor", "gt.Scalar", "remainder.Scalar", "bitwise_and.Scalar"):
        attrs, _ = host_call(f"aten.{name}", {"self": Value("x"), "other": number})
        try:
            (expected,) = host.reference(attrs, {"src_0": x})
        except RuntimeError:  # a division by zero; bits of a float
            continue
        place = torch.empty_like(expected)
        host.operator(attrs, {"src_0": x}, [place])()
        torch.testing.assert_close(place, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("policy", ["propagate", "optimal"])
def test_an_adaptive_average_behind_a_convolution_is_right(policy):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.AdaptiveAvgPool2d(5)).eval()
    x = torch.randn(2, 16, 14, 14)
    compiled = fp.compile(module, x, policy=policy, verify="off")
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- scans, complex numbers


class Scans(nn.Module):
    """Running sums and products along each axis."""

    def forward(self, x):
        return x.cumsum(0), x.cumprod(1), x.cumsum(-2), x.logcumsumexp(2), x.cumsum(3), (x > 0).cumsum(1)


@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
def test_scans_run_along_rows(policy):
    x = torch.randn(3, 4, 5, 6)
    net = fp.compile(Scans(), x, policy=policy, tune="model")
    for got, expected in zip(net(x), Scans()(x), strict=True):
        torch.testing.assert_close(got, expected)
    calls = [node for node in net.compilation.imported.nodes() if node.op == "aten" and "cum" in node.attrs.target]
    assert [json.loads(node.attrs.arguments)["dim"] for node in calls] == [3, 3, 3, 3, 3, 1]


class Places(nn.Module):
    """Places of extremes along each axis, and of the whole tensor."""

    def forward(self, x):
        integers = x.nan_to_num().long()
        return x.argmax(1), x.argmin(-1, keepdim=True), x.bfloat16().argmax(2), integers.argmin(0), x.argmax()


def test_places_of_extremes_are_read_beside_them():
    # for the places alone, PyTorch takes up to 25 times as long
    x = torch.randint(0, 3, (2, 5, 6, 7), generator=torch.Generator().manual_seed(0)).float()  # with equal numbers
    x[0, 2, 3] = torch.nan
    net = fp.compile(Places(), x, policy="propagate")
    for got, expected in zip(net(x), Places()(x), strict=True):
        assert torch.equal(got, expected)
    calls = [node.attrs.target for node in net.compilation.imported.nodes() if node.op == "aten"]
    assert [name for name in calls if "max" in name] == ["aten.max.dim", "aten.max.dim", "aten.argmax.default"]
    assert [name for name in calls if "min" in name] == ["aten.min.dim", "aten.argmin.default"]


def test_places_of_rows_are_no_numbers_for_a_check():
    # rows between places out of order belong to no matrix: PyTorch leaves them unwritten
    rows, matrices, ends = TensorType((8, 8), "bf16"), TensorType((2, 8, 16), "bf16"), TensorType((2,), "s32")
    call = FakeCall("aten._grouped_mm.default", rows, matrices, ends)
    assert not ATEN.numbers.checkable(call.graph.node(make_host_call(call)[0].node).attrs)
    call = FakeCall("aten._grouped_mm.default", TensorType((2, 8, 8), "bf16"), matrices)
    assert ATEN.numbers.checkable(call.graph.node(make_host_call(call)[0].node).attrs)


class MarkedPlaces(nn.Module):
    """Numbers in the places that a mask marks: the tensors' own types stay."""

    def forward(self, x, mask):
        whole, half = x.long(), x.half()
        numbers = x.masked_fill(mask, -torch.inf), whole.masked_fill(mask, 7), half.masked_fill(mask[:, :1], 0.1)
        return *numbers, (x > 0).masked_fill(~mask, True), whole.masked_fill(mask, -2.5), x.masked_fill(mask, x.max())


def test_marked_places_are_a_choice():
    # to fill places, PyTorch copies the whole tensor first
    args = torch.randn(2, 5, 6), torch.rand(2, 5, 6) > 0.5
    net = fp.compile(MarkedPlaces(), args, policy="propagate")
    for got, expected in zip(net(*args), MarkedPlaces()(*args), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    assert sum(getattr(node.attrs, "target", "") == "aten.where.self" for node in net.compilation.imported.nodes()) == 4


class Bits(nn.Module):
    """Python's operators on bits, between several types."""

    def forward(self, x, y, mask):
        shifts = (x << 2) >> 1, x << (y & 3), y >> (x & 1), (y << 3) | 1
        return *shifts, x & y, y & 5, x ^ -1, (mask & (y > 0)) | ~mask, mask ^ True, mask & x


def test_operators_on_bits_write_to_given_memory():
    args = torch.randint(-99, 99, (3, 7)), torch.randint(-99, 99, (3, 7), dtype=torch.int8), torch.rand(3, 7) > 0.5
    net = fp.compile(Bits(), args, policy="propagate")
    for got, expected in zip(net(*args), Bits()(*args), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    calls = [node.attrs.target for node in net.compilation.imported.nodes() if node.op == "aten"]
    assert len(calls) > 12 and not any("__" in name for name in calls)


class Spectrum(nn.Module):
    """Complex numbers between two transforms; calls with and without an overload that writes to given memory."""

    def forward(self, x):
        y = torch.fft.rfft2(x)
        z = torch.rot90(y[..., 1:3] * (2 - 1j), 1, (-2, -1))
        return torch.fft.irfft2(y * y.conj()), torch.view_as_real(z), y.abs(), torch.complex(x, x + 1).sum(-1).real


@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
def test_complex_numbers_are_views_of_their_parts(policy):
    x = torch.randn(2, 3, 6, 7)
    net = fp.compile(Spectrum(), x, policy=policy, tune="model")
    for _ in range(2):
        for got, expected in zip(net(x), Spectrum()(x), strict=True):
            torch.testing.assert_close(got, expected)


def test_complex_operands_in_pairs_are_not_copied():
    attrs, _ = host_call("aten.mul.Tensor", {"self": Parts(Value("x")), "other": Parts(Value("x"))})
    pairs, apart = torch.randn(3, 4, 2), torch.randn(2, 3, 4).permute(1, 2, 0)
    place = torch.empty(3, 4, 2)
    call = host.operator(attrs, {"src_0": pairs}, [place])
    pairs.copy_(torch.randn(3, 4, 2))  # the next run's numbers
    call()
    torch.testing.assert_close(torch.view_as_complex(place), torch.view_as_complex(pairs) ** 2)
    assert host.operator(attrs, {"src_0": apart}, [place]) is None
    assert host.operator(attrs, {"src_0": torch.randn(25)[1:].view(3, 4, 2)}, [place]) is None
