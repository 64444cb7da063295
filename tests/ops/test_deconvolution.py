from __future__ import annotations

import pytest
import torch

import fmtprop as fp
from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops import Deconv
from fmtprop.ops.convolution import problem
from fmtprop.ops.deconvolution import DECONVOLUTION
from tests.ops.fake_call import FakeCall, check_import

X2 = TensorType((2, 6, 5, 4))


def weights(*dims):
    return torch.randn(*dims, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- shapes


def test_dst_is_what_the_convolution_would_read():
    types = problem((1, 8, 7, 7), 16, (4, 4))
    assert DECONVOLUTION.infer(Deconv.make(2, 2, pad_l=1), types)[0].dims == (1, 16, 14, 14)


def test_a_negative_right_padding_adds_rows():
    types = problem((1, 8, 7, 7), 16, (3, 3))
    assert DECONVOLUTION.infer(Deconv.make(2, 2, pad_l=1, pad_r=0), types)[0].dims == (1, 16, 14, 14)
    assert DECONVOLUTION.infer(Deconv.make(2, 2, pad_l=0, pad_r=-1), types)[0].dims == (1, 16, 16, 16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Deconv.make(2, 2, pad_r=-2), "pad_r[0] is -2, but must be at least -1 (1 - stride)"),
        (lambda: Deconv.make(1, 0), "deconvolution strides[0] is 0, but must be at least 1"),
        (lambda: Deconv.make(2, groups=0), "deconvolution groups is 0, but must be at least 1"),
    ],
)
def test_attributes_out_of_range_are_named(make, message):
    with pytest.raises(ShapeError) as error:
        make()
    assert message in str(error.value)


def test_channels_that_do_not_fit_are_named():
    types = {**problem((1, 8, 7, 7), 16, (3, 3)), "src": TensorType((1, 9, 7, 7))}
    with pytest.raises(ShapeError, match=r"src axis 1 has 9 channels but weights axis 1 expects 8 \(groups=1\)"):
        DECONVOLUTION.infer(Deconv.make(2), types)


def test_an_empty_dst_is_refused():
    with pytest.raises(ShapeError, match=r"dst axis 2 would be empty: 3 positions less padding 4"):
        DECONVOLUTION.infer(Deconv.make(2, pad_l=2), problem((1, 8, 1, 7), 16, (3, 3)))


# ---------------------------------------------------------------- importers (they check the reference against torch)


@pytest.mark.parametrize(
    ("target", "src", "kernel"),
    [
        ("aten.conv_transpose1d.default", (2, 6, 7), (3,)),
        ("aten.conv_transpose2d.input", (2, 6, 5, 4), (3, 4)),
        ("aten.conv_transpose3d.input", (1, 6, 3, 4, 2), (2, 3, 3)),
    ],
)
@pytest.mark.parametrize("groups", [1, 3])
def test_every_rank(target, src, kernel, groups):
    call = check_import(
        target, TensorType(src), weights(6, 4, *kernel), weights(4 * groups),
        stride=[3], padding=[1], output_padding=[2], groups=groups, dilation=[2],
    )  # fmt: skip
    split = ["reshape"] if groups > 1 else []
    assert call.ops() == [*split, "permute", "deconvolution"]


def test_without_bias_and_without_batch():
    call = check_import("aten.conv_transpose2d.input", TensorType((6, 5, 4)), weights(6, 3, 2, 2), stride=[2])
    assert set(call.ops()) == {"reshape", "permute", "deconvolution"}


def test_the_decomposed_form():
    args = ([2, 2], [1, 1], [1, 1], True, [1, 0], 2)
    call = check_import("aten.convolution.default", X2, weights(6, 5, 3, 3), weights(10), *args)
    assert call.ops()[-1] == "deconvolution"


def test_output_padding_beyond_the_stride_is_declined():
    call = FakeCall(
        "aten.conv_transpose2d.input", X2, weights(6, 3, 2, 2), None, stride=[1], output_padding=[1], dilation=[2]
    )
    assert call.run() is None
    assert call.ops() == []


def test_an_empty_result_is_declined():
    call = FakeCall("aten.conv_transpose2d.input", TensorType((2, 8, 3, 1)), weights(8, 4, 1, 2), None, padding=[0, 1])
    assert call.run() is None


def test_pytorch_competes_where_onednn_has_only_gradients_of_convolutions():
    net = fp.compile(torch.nn.ConvTranspose2d(3, 3, 4), torch.randn(1, 3, 200, 200), tune="model", confirm=False)
    assert not any("gemm" in step.node.choice.impl for step in net.plan.steps)


def test_the_reference_asks_pytorch_for_the_kernel_of_channels_last():
    """One input channel has both memory formats: 4.0 ms by the kernel of plain weights, 0.2 by the other."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.conv_transpose2d:
                seen.append(args[1].is_contiguous(memory_format=torch.channels_last))
            return func(*args, **(kwargs or {}))

    operands = {"src": torch.randn(1, 1, 8, 8), "weights": weights(3, 1, 4, 4), "bias": torch.randn(3)}
    with Watch():
        (dst,) = DECONVOLUTION.reference(Deconv.make(2, pad_l=1), operands)
    assert seen == [True]
    expected = torch.nn.functional.conv_transpose2d(
        operands["src"], operands["weights"].transpose(0, 1), operands["bias"], padding=1
    )
    assert torch.allclose(dst, expected, atol=1e-5)


@pytest.mark.parametrize("pad_l, pad_r", [(1, 0), (0, -1), (1, 2), (2, 0), (0, 0)])
def test_the_reference_cuts_and_adds_rows(pad_l, pad_r):
    src, kernel = torch.randn(2, 3, 5, 6), weights(4, 3, 3, 3)
    (dst,) = DECONVOLUTION.reference(Deconv.make(2, 2, pad_l=pad_l, pad_r=pad_r), {"src": src, "weights": kernel})
    whole = torch.nn.functional.conv_transpose2d(src, kernel.transpose(0, 1), stride=2)
    assert torch.allclose(dst, torch.nn.functional.pad(whole, [-pad_l, -pad_r] * 2), atol=1e-5)
