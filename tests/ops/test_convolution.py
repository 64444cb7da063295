from __future__ import annotations

import pytest
import torch
from torch import nn

from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops import Conv
from fmtprop.ops.convolution import CONVOLUTION, problem
from tests.ops.fake_call import FakeCall, check_import

X2 = TensorType((2, 6, 9, 10))


def infer(attrs, types):
    return CONVOLUTION.infer(attrs, types)[0].dims


# ---------------------------------------------------------------- shapes


def test_dst_has_the_output_channels_and_window_positions():
    assert infer(Conv.make(2, 2, pad_l=3), problem((1, 3, 224, 224), 64, (7, 7))) == (1, 64, 112, 112)
    assert infer(Conv.make(2, pad_l=1, groups=4), problem((2, 8, 5, 5), 12, (3, 3), 4)) == (2, 12, 5, 5)
    assert infer(Conv((1, 2), (1, 0), (0, 1), (2, 0)), problem((1, 4, 8, 9), 2, (3, 2))) == (1, 2, 6, 5)


def test_dst_keeps_the_data_type_of_src():
    types = {name: t.with_dtype("bf16") for name, t in problem((1, 3, 8, 8), 4, (3, 3)).items()}
    assert CONVOLUTION.infer(Conv.make(2), types)[0] == TensorType((1, 4, 6, 6), "bf16")


@pytest.mark.parametrize(
    ("attrs", "change", "message"),
    [
        (
            Conv.make(2),
            {"src": TensorType((1, 32, 8, 8))},
            "src axis 1 has 32 channels but weights axis 1 expects 16 (groups=1)",
        ),
        (
            Conv.make(2, groups=2),
            {"weights": TensorType((2, 4, 4, 3, 3))},
            "src axis 1 has 16 channels but weights axis 2 expects 8 (groups=2)",
        ),
        (
            Conv.make(2, groups=4),
            {"weights": TensorType((2, 4, 8, 3, 3))},
            "weights axis 0 has 2 groups but the attribute says groups=4",
        ),
        (Conv.make(2, groups=2), {}, "weights has 4 axes but [G, O/G, I/G, k…] needs 5 (groups=2)"),
        (Conv.make(2), {"src": TensorType((16, 8, 8))}, "src has 3 axes but 2 spatial axes need 4"),
        (Conv.make(2), {"bias": TensorType((9,))}, "bias has dims (9,) but the 8 output channels need (8,)"),
        (
            Conv.make(2, dilates=3),
            {},
            "src axis 2 has 8 elements and padding 0+0, but the window covers 9 (kernel=3, dilates=3)",
        ),
    ],
)
def test_operands_that_do_not_fit_are_named(attrs, change, message):
    types = {**problem((1, 16, 8, 8), 8, (3, 3)), **change}
    with pytest.raises(ShapeError) as error:
        CONVOLUTION.infer(attrs, types)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conv((1, 0), (0, 0), (0, 0), (0, 0)), "convolution strides[1] is 0, but must be at least 1"),
        (lambda: Conv((1,), (-1,), (0,), (0,)), "convolution dilates[0] is -1, but must be at least 0"),
        (lambda: Conv((1,), (0,), (0, 0), (0,)), "strides=(1,) and pad_l=(0, 0) must have the same length"),
        (lambda: Conv((1,) * 4, (0,) * 4, (0,) * 4, (0,) * 4), "convolution has 1 to 3 spatial axes"),
        (lambda: Conv.make(2, groups=0), "convolution groups is 0, but must be at least 1"),
    ],
)
def test_attributes_out_of_range_are_named(make, message):
    with pytest.raises(ShapeError) as error:
        make()
    assert message in str(error.value)


# ---------------------------------------------------------------- reference


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_reference_is_the_module(groups):
    module = nn.Conv2d(6, 12, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=groups)
    x = torch.randn(2, 6, 9, 10)
    weights = module.weight.detach()
    if groups > 1:
        weights = weights.reshape(groups, 12 // groups, 6 // groups, 3, 2)
    tensors = {"src": x, "weights": weights, "bias": module.bias.detach()}
    (got,) = CONVOLUTION.reference(Conv((2, 1), (0, 1), (1, 2), (1, 2), groups), tensors)
    torch.testing.assert_close(got, module(x).detach())


# ---------------------------------------------------------------- importers


def weights(*dims):
    return torch.randn(*dims, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("target", "src", "kernel"),
    [
        ("aten.conv1d.default", (2, 6, 12), (3,)),
        ("aten.conv2d.default", (2, 6, 9, 10), (3, 2)),
        ("aten.conv3d.default", (1, 6, 5, 6, 7), (3, 1, 2)),
    ],
)
def test_every_rank_with_strides_padding_and_dilation(target, src, kernel):
    call = check_import(
        target, TensorType(src), weights(4, 6, *kernel), weights(4), stride=[2], padding=[1], dilation=[2]
    )
    assert call.ops() == ["convolution"]


def test_groups_split_the_weights_by_a_view():
    call = check_import("aten.conv2d.default", X2, weights(8, 3, 3, 3), weights(8), [2, 1], [1, 0], [1, 1], 2)
    assert call.ops() == ["reshape", "convolution"]
    convolution = call.graph.nodes()[-1]
    assert convolution.attrs == Conv((2, 1), (0, 0), (1, 0), (1, 0), 2)
    assert call.graph.type_of(call.graph.inputs(convolution.name)["weights"]).dims == (2, 4, 3, 3, 3)


def test_without_bias_and_without_batch():
    call = check_import("aten.conv2d.default", TensorType((6, 9, 10)), weights(4, 6, 3, 3))
    assert call.ops() == ["reshape", "convolution", "reshape"]


@pytest.mark.parametrize("name", ["same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 3), (4, 2), (1, 5)])
def test_named_padding(name, kernel):
    call = check_import("aten.conv2d.padding", X2, weights(4, 6, *kernel), weights(4), [1], name, [2, 1])
    if name == "same" and kernel == (4, 2):
        (node,) = [n for n in call.graph.nodes() if n.op == "convolution"]
        assert (node.attrs.pad_l, node.attrs.pad_r) == ((3, 0), (3, 1))


def test_named_padding_in_one_and_three_dimensions():
    check_import("aten.conv1d.padding", TensorType((2, 3, 9)), weights(4, 3, 4), None, [1], "same")
    check_import("aten.conv3d.padding", TensorType((1, 3, 4, 5, 6)), weights(4, 3, 2, 3, 4), None, [1], "same")


def test_the_decomposed_form():
    args = ([2, 2], [1, 1], [1, 1], False, [0, 0], 3)
    call = check_import("aten.convolution.default", X2, weights(9, 2, 3, 3), None, *args)
    assert call.ops() == ["reshape", "convolution"]


def test_bf16_is_imported_and_f64_is_declined():
    half = [t.to(torch.bfloat16) for t in (weights(4, 6, 3, 3), weights(4))]
    call = FakeCall("aten.conv2d.default", X2.with_dtype("bf16"), *half)
    assert call.type(call.run()).dtype.value == "bf16"
    double = FakeCall("aten.conv2d.default", X2.with_dtype("f64"), weights(4, 6, 3, 3).double())
    assert double.run() is None
    assert double.ops() == []
