from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ops import Prelu, emit
from fmtprop.ops.prelu import PRELU
from tests.ops.fake_call import FakeCall, check_import

NEEDS_BF16 = pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")

X = TensorType((2, 6, 4, 5))


@pytest.mark.parametrize(
    ("args", "ops"),
    [
        ((X, TensorType((6,))), ["reshape", "prelu"]),
        ((X, TensorType((1,))), ["reshape", "prelu"]),
        ((TensorType((2, 6)), TensorType((6,))), ["reshape", "prelu"]),
        ((TensorType((5,)), TensorType((1,))), ["prelu"]),
        ((X.with_dtype("bf16"), TensorType((6,), "bf16")), ["reshape", "prelu"]),
    ],
)
def test_importer_agrees_with_torch(args, ops):
    assert check_import("aten.prelu.default", *args).ops() == ops


@pytest.mark.parametrize("slope", [0.25, -0.5, 1.5, 0.0])
def test_one_constant_slope_is_a_leaky_relu(slope):
    assert check_import("aten.prelu.default", X, torch.tensor([slope])).ops() == ["eltwise"]


@pytest.mark.parametrize("slopes", [torch.tensor([torch.inf]), torch.full((6,), 0.25)])
def test_other_constant_slopes_are_not(slopes):
    assert check_import("aten.prelu.default", X, slopes).ops() == ["reshape", "prelu"]


def test_kernel_form_has_aligned_weights():
    assert check_import("aten._prelu_kernel.default", X, TensorType((1, 6, 1, 1))).ops() == ["prelu"]


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=NEEDS_BF16)])
@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
@pytest.mark.parametrize("channels", [8, 17])
def test_slopes_of_channels_are_applied_within_convolutions(channels, policy, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(5, channels, 3, padding=1), nn.PReLU(channels)),
        *(nn.Conv2d(channels, channels, 3, groups=channels), nn.PReLU(channels)),
        *(nn.ConvTranspose2d(channels, 7, 4, 2, 1), nn.PReLU(7)),
    )
    for module in model[1::2]:
        nn.init.uniform_(module.weight, -0.5, 1.5)
    x = torch.randn(2, 5, 9, 7)
    net = fp.compile(model, x, policy=policy, dtype=dtype)
    assert "prelu" not in {node.op for node in net.graph.nodes()}
    with torch.no_grad():
        want = model(x)
    tolerance = 1e-5 if dtype == "f32" else 0.03
    assert (net(x) - want).abs().max() <= tolerance * want.abs().max()


def test_nan_goes_through_slopes_within_a_convolution():
    model, x = nn.Sequential(nn.Conv2d(8, 8, 1), nn.PReLU(8)), torch.randn(1, 8, 4, 8)
    x[0, 0, 0, 0] = torch.nan
    with torch.no_grad():
        assert torch.equal(fp.compile(model, x)(x).isnan(), model(x).isnan())


def test_f64_is_declined():
    assert FakeCall("aten.prelu.default", X.with_dtype("f64"), TensorType((6,), "f64")).run() is None


def test_reference_matches_torch_on_nan_and_zero():
    x = torch.tensor([[-2.0, 0.0, 3.0, torch.nan]])
    (dst,) = PRELU.reference(Prelu(), {"src": x, "weights": torch.full((1, 1), 0.25)})
    torch.testing.assert_close(dst, torch.nn.functional.prelu(x, torch.tensor([0.25])), equal_nan=True)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1, 5, 1, 1), "src axis 1 has size 6 but weights axis 1 has 5; it must be that or 1"),
        ((6,), "src has 4 dimensions but weights 1; give weights dimensions of size 1"),
    ],
)
def test_errors(weights, message):
    graph = Graph()
    inputs = {"src": graph.input("x", X), "weights": graph.input("w", TensorType(weights))}
    with pytest.raises(ShapeError, match=message):
        emit(graph, "prelu", inputs, Prelu())
