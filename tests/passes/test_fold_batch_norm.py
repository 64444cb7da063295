from __future__ import annotations

import pytest
import torch

from fmtprop.ir.deferred import Deferred
from fmtprop.ir.grid import Grid
from fmtprop.ops import BatchNorm, Eltwise, Reshape
from fmtprop.ops.convolution import Conv
from fmtprop.ops.deconvolution import Deconv
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.matmul import MatMul
from fmtprop.passes.editing import constant
from fmtprop.passes.rewrites.fold_batch_norm import FoldBatchNorm
from tests.passes.rewriting import Builder, rewrite, summary


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_folds_into_a_convolution(groups, bias, affine):
    build = Builder()
    conv = build.conv(build.input(2, 8, 5, 5), 12, "conv", bias, kernel=3, groups=groups)
    folded = rewrite(build.output(build.act(build.norm(conv, "bn", affine))), FoldBatchNorm(), tolerance=1e-4)
    assert summary(folded) == ["conv", "relu"]
    assert set(folded.inputs("conv")) == {"src", "weights", "bias"}


@pytest.mark.parametrize(
    ("dims", "shape", "folds"),
    [
        ((3, 8, 1, 5), (3, 6, 5), True),
        ((3, 8, 5, 1), (1, 3, 6, 5), False),  # the channels of a batch normalization are along axis 1
        ((3, 8, 2, 5), (3, 6, 10), False),
        ((1, 8, 1, 5), (1, 6, 1, 1, 5), True),
    ],
)
def test_channels_fold_through_a_reshape_of_axes_of_size_1(dims, shape, folds):
    build = Builder()
    conv = build.conv(build.input(*dims), 6, "conv", False)
    value = build.op("reshape", Reshape(shape), "squeeze", src=conv)
    folded = rewrite(build.output(build.norm(value, "bn")), FoldBatchNorm(), tolerance=1e-4)
    assert summary(folded) == (["conv", "squeeze"] if folds else ["conv", "squeeze", "bn"])


def test_a_bias_behind_a_reshape_of_axes_of_size_1_folds_along_the_channels():
    build = Builder()
    conv = build.conv(build.input(3, 8, 5, 1), 6, "conv", True)
    value = build.op("reshape", Reshape((1, 3, 6, 5)), "squeeze", src=conv)
    value = build.binary("add", value, build.constant(build.random(1, 1, 6, 1)), "bias")
    assert summary(rewrite(build.output(value), FoldBatchNorm(), tolerance=1e-5)) == ["conv", "squeeze"]


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_folds_into_a_deconvolution(groups):
    build = Builder()
    weights = build.random(6, 8, 3, 3) if groups == 1 else build.random(2, 3, 4, 3, 3)
    attrs = Deconv.make(2, 2, groups=groups)
    value = build.op("deconvolution", attrs, "up", src=build.input(1, 8, 4, 4), weights=build.constant(weights))
    folded = rewrite(build.output(build.norm(value, "bn")), FoldBatchNorm(), tolerance=1e-4)
    assert summary(folded) == ["up"]


def test_batch_norm_folds_into_matrix_products():
    build = Builder()
    x = build.input(5, 8)
    weights, bias = build.constant(build.random(6, 8)), build.constant(build.random(6))
    value = build.norm(build.op("inner_product", InnerProduct(), "fc", src=x, weights=weights, bias=bias), "bn_1")
    value = build.op("matmul", MatMul(), "mm", src=value, weights=build.constant(build.random(6, 7)))
    folded = rewrite(build.output(build.norm(value, "bn_2")), FoldBatchNorm(), tolerance=1e-4)
    assert summary(folded) == ["fc", "mm"]


@pytest.mark.parametrize(("shape", "folds"), [((1, 7), True), ((1, 1), True), ((5, 1), False), ((5, 7), False)])
def test_a_product_folds_with_a_bias_along_its_outputs_alone(shape, folds):
    build = Builder()
    weights, bias = build.constant(build.random(6, 7)), build.constant(build.random(*shape))
    value = build.op("matmul", MatMul(), "mm", src=build.input(5, 6), weights=weights, bias=bias)
    value = build.binary("mul", value, build.constant(build.random(1, 7)), "factors")
    folded = rewrite(build.output(value), FoldBatchNorm(), tolerance=1e-5)
    assert summary(folded) == (["mm"] if folds else ["mm", "factors"])


def test_factors_fold_into_a_batch_of_matrices():
    build = Builder()
    weights = build.constant(build.random(3, 6, 7))
    value = build.op("matmul", MatMul(), "mm", src=build.input(3, 5, 6), weights=weights)
    value = build.binary("mul", value, build.constant(build.random(1, 1, 7)), "factors")
    assert summary(rewrite(build.output(value), FoldBatchNorm(), tolerance=1e-5)) == ["mm"]


def test_per_channel_arithmetic_folds_in_chains():
    build = Builder()
    value = build.conv(build.input(1, 4, 5, 5), 6, "conv")
    channel = lambda: build.constant(build.random(1, 6, 1, 1).abs() + 0.5)  # noqa: E731
    value = build.binary("mul", value, channel())
    value = build.binary("add", channel(), value)
    value = build.binary("sub", channel(), value)
    value = build.binary("div", value, channel())
    value = build.binary("sub", value, build.constant(torch.tensor(0.25).reshape(1, 1, 1, 1)), "scalar")
    value = build.act(value, "linear", None, 3.0, -1.0)
    folded = rewrite(build.output(build.norm(value, "bn")), FoldBatchNorm(), tolerance=1e-4)
    assert summary(folded) == ["conv"]


def test_weights_are_rounded_once_from_f64():
    build = Builder()
    conv = build.conv(build.input(1, 3, 4, 4), 5, "conv")
    graph = build.output(build.norm(conv, "bn"))
    inputs = graph.inputs("bn")
    folded = FoldBatchNorm().run(graph)
    data = {name: graph.constants[value.node].double() for name, value in inputs.items() if name != "src"}
    scale = data["scale"] / torch.sqrt(data["variance"] + 1e-3)
    weights = graph.constants[graph.inputs("conv")["weights"].node].double()
    exact = (weights * scale.reshape(5, 1, 1, 1)).float()
    got = folded.constants[folded.inputs("conv")["weights"].node]
    assert ((got - exact).abs() <= torch.finfo(torch.float32).eps * exact.abs()).all()


def test_what_cannot_fold_stays():
    build = Builder()
    x = build.input(1, 4, 5, 5)
    both = build.conv(x, 4, "read_twice")
    computed = build.input(4, name="computed")
    statistics = {"mean": computed, "variance": build.constant(torch.ones(4))}
    conv = build.conv(x, 4, "conv")
    graph = build.output(
        both,
        build.norm(both, "bn_1"),
        build.norm(build.act(x), "bn_2"),
        build.op("batch_normalization", BatchNorm(), "bn_3", src=conv, **statistics),
        build.binary("mul", build.conv(x, 4, "conv_4"), build.constant(build.random(1, 1, 5, 5)), "per_pixel"),
        build.binary("div", build.constant(build.random(1, 4, 1, 1)), build.conv(x, 4, "conv_5"), "inverse"),
        build.binary("add", build.conv(x, 4, "conv_6"), x, "residual"),
    )
    assert summary(rewrite(graph, FoldBatchNorm())) == summary(graph)


def test_a_variance_that_gives_no_finite_weights_stays():
    build = Builder()
    conv = build.conv(build.input(1, 2, 3, 3), 2, "conv")
    zeros = build.constant(torch.zeros(2))
    graph = build.output(build.op("batch_normalization", BatchNorm(0.0), "bn", src=conv, mean=zeros, variance=zeros))
    folded = FoldBatchNorm().run(graph)
    assert summary(folded) == ["conv", "bn"]


def test_factors_up_to_1_read_no_weights():
    build = Builder()
    conv = build.conv(build.input(1, 2, 3, 3), 2, "conv", False)
    graph = build.output(build.act(conv, "linear", None, 0.125, 0.0))
    name = graph.inputs("conv")["weights"].node
    type_ = graph.node(name).results[0]
    graph.constants[name] = Deferred(type_, graph.constants[name].stride(), lambda: pytest.fail("read"))
    assert summary(FoldBatchNorm().run(graph)) == ["conv"]


def test_computed_weights_stay():
    build = Builder()
    from fmtprop.ops.convolution import Conv

    weights = build.input(4, 3, 1, 1, name="w")
    conv = build.op("convolution", Conv.make(2), "conv", src=build.input(1, 3, 4, 4), weights=weights)
    assert summary(rewrite(build.output(build.norm(conv, "bn")), FoldBatchNorm())) == ["conv", "bn"]


def test_parameters_that_require_gradients_fold_too():
    build = Builder()
    graph = build.output(build.norm(build.conv(build.input(2, 8, 5, 5), 12, "conv", kernel=3), "bn"))
    expected = FoldBatchNorm().run(graph)
    for name, data in graph.constants.items():
        graph.constants[name] = data.clone().requires_grad_()
    folded = FoldBatchNorm().run(graph)
    assert summary(folded) == ["conv"]
    for name, data in folded.constants.items():
        assert torch.equal(data, expected.constants[name])
        assert not data.requires_grad


def test_what_half_precision_cannot_hold_is_not_folded():
    build = Builder()
    weights = torch.full((6, 4, 1, 1), 60000.0, dtype=torch.float16)
    attrs = Conv.make(2)
    bias = build.constant(torch.zeros(6))
    conv = build.op(
        "convolution", attrs, "conv", src=build.input(1, 4, 3, 3), weights=build.constant(weights), bias=bias
    )
    doubled = build.op("eltwise", Eltwise("linear", 2.0), "doubled", src=conv)
    assert summary(FoldBatchNorm().run(build.output(doubled))) == ["conv", "doubled"]


@pytest.mark.parametrize(
    "factor, least, kept", [(1.0, -128, True), (-1.0, -127, True), (-1.0, -128, False), (0.0, -127, False)]
)
def test_weights_on_a_grid_stay_on_one(factor, least, kept):
    build = Builder()
    numbers = torch.randint(least, 128, (6, 8, 3, 3))
    numbers[1, 0, 0, 0] = least
    weights = build.constant(numbers * 0.25)
    build.graph.replace(build.graph.node(weights.node).with_(grids={"dst": Grid((0.25,), -128, 127)}))
    value = build.op("convolution", Conv.make(2), "conv", src=build.input(1, 8, 5, 5), weights=weights)
    factors = torch.full((1, 6, 1, 1), factor)
    factors[0, 0] = 3.0
    folded = rewrite(
        build.output(build.binary("mul", value, build.constant(factors), "factors")), FoldBatchNorm(), tolerance=1e-3
    )
    assert summary(folded) == ["conv"]
    grids = folded.node(folded.inputs("conv")["weights"].node).grids
    assert bool(grids) == kept
    if kept:
        steps = torch.tensor(grids["dst"].scales).reshape(6, 1, 1, 1)
        held = constant(folded, folded.inputs("conv")["weights"]) / steps
        assert (held - held.round()).abs().max() < 1e-4
        assert grids["dst"].low <= held.min() + 1e-4
        assert held.max() <= grids["dst"].high + 1e-4


def test_a_bias_alone_leaves_the_weights_as_they_are():
    build = Builder()
    weights = build.random(6, 7)
    value = build.op("matmul", MatMul(), "mm", src=build.input(5, 6), weights=build.constant(weights))
    folded = rewrite(
        build.output(build.binary("add", value, build.constant(build.random(1, 7)), "bias")), FoldBatchNorm()
    )
    assert summary(folded) == ["mm"]
    assert folded.constants[folded.inputs("mm")["weights"].node] is weights
