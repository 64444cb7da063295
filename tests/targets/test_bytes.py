"""Numbers stored as bytes of their grids: primitives, against exact sums, with full-range integers."""

from __future__ import annotations

import pytest
import torch

from fmtprop import dnnl
from fmtprop.errors import UnsupportedOpError
from fmtprop.ir.grid import Grid
from fmtprop.ir.node import PostOp
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import (
    Binary,
    Conv,
    Deconv,
    DynamicQuantize,
    Eltwise,
    FakeQuantize,
    InnerProduct,
    MatMul,
    Pooling,
    Reorder,
    Resampling,
)
from fmtprop.passes.precision.in_bytes import in_bytes, in_reals
from fmtprop.passes.target import free_request
from fmtprop.runtime.selfcheck import check_node
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.kernels import kernel_candidates as kernels
from fmtprop.targets.known_bad import known_bad
from fmtprop.targets.scaling import Function, Kept, chain_of, scaling_of, stored_of, with_usual_scales
from tests.targets.nodes import node_of

U8, S8, SHIFTED = Grid((0.02,), 0, 255), Grid((0.02,), -128, 127), Grid((0.02,), -117, 138)
SIGNED = Grid((0.02,), -117, 138, signed=True)
RESULT = FakeQuantize(1.37, -100, 155)

needs_vnni = pytest.mark.skipif(
    not any(dnnl.lib().includes(isa) for isa in ("avx512_core_vnni", "avx2_vnni")),
    reason="this CPU has no VNNI: products of bytes saturate",
)


def weights_grid(dims, axes=(0,)):
    shape = tuple(size if axis in axes else 1 for axis, size in enumerate(dims))
    count = torch.tensor([shape]).prod().item()
    return Grid(tuple((0.01 + 0.001 * torch.arange(count)).tolist()), -128, 127, shape)


def convolution(src=U8, channels=16, outputs=32, kernel=3, groups=1, post_ops=(), stride=1):
    weights = (outputs, channels // groups, kernel, kernel)
    if groups > 1:
        weights = (groups, outputs // groups, *weights[1:])
    types = {"src": TensorType((2, channels, 9, 9)), "weights": TensorType(weights), "bias": TensorType((outputs,))}
    node = node_of("convolution", Conv.make(2, strides=stride, pad_l=kernel // 2, groups=groups), types, post_ops)
    grids = {"src": src, "weights": weights_grid(weights, (0, 1) if groups > 1 else (0,))}
    if post_ops and isinstance(post_ops[-1].attrs, FakeQuantize):
        grids["dst"] = post_ops[-1].attrs.grid
    return node.with_(grids=grids), types


def ways(node, types):
    """Yield the node as each implementation for bytes runs it."""
    target = OneDnnTarget()
    for request in in_bytes(node, free_request(node, types)):
        for candidate in target.candidates(node, request):
            stored = tuple(desc.dtype for desc in candidate.results)
            results = tuple(t.with_dtype(dtype) for t, dtype in zip(node.results, stored, strict=True))
            yield node.with_(results=results, descs=candidate.results, choice=candidate.choice("test"))


ROUNDED = (PostOp("fake_quantize", RESULT),)


@pytest.mark.parametrize(
    "post_ops", [(), ROUNDED, (PostOp("eltwise", Eltwise("relu")), *ROUNDED)], ids=["f32", "u8", "relu"]
)
@pytest.mark.parametrize("src", [U8, S8, SHIFTED], ids=["u8", "s8", "shifted"])
@pytest.mark.parametrize(
    "shape",
    [
        {"channels": 16, "outputs": 32},
        {"channels": 17, "outputs": 19},
        {"channels": 3, "outputs": 16, "kernel": 7, "stride": 2},
        {"channels": 24, "outputs": 144, "kernel": 1},
        {"channels": 17, "outputs": 19, "kernel": 1, "stride": 2},
        {"channels": 24, "outputs": 24, "groups": 24},
        {"channels": 32, "outputs": 64, "groups": 4},
        {"channels": 1, "outputs": 1},
    ],
    ids=str,
)
def test_every_convolution_of_bytes_is_exact(src, shape, post_ops):
    node, types = convolution(src, post_ops=post_ops, **shape)
    for formatted in ways(node, types):
        if formatted.choice.impl.startswith("ref"):
            continue
        assert check_node(formatted) is None, f"{formatted.choice.impl} {formatted.descs}"


@needs_vnni
@pytest.mark.parametrize(
    "axes, expected", [((0,), [0, 0, 1, 1, 2, 2]), ((1,), [0, 1] * 3), ((0, 1), range(6))], ids=str
)
def test_scales_of_groups_are_those_of_all_outputs(axes, expected):
    node, types = convolution(SHIFTED, 3, 6, 1, 3, (PostOp("fake_quantize", FakeQuantize(0.002, 0, 255)),))
    grid = weights_grid((3, 2, 1, 1, 1), axes)
    small = Grid(tuple(scale / 1000 for scale in grid.scales), grid.low, grid.high, grid.shape)
    node = node.with_(grids={**node.grids, "weights": small})
    found = list(ways(node, types))
    assert found and {check_node(formatted) for formatted in found} == {None}
    for formatted in found:
        scaling = scaling_of(formatted, stored_of(formatted))
        assert scaling.scales["weights"] == tuple(SHIFTED.scale * small.scales[place] for place in expected)


@needs_vnni
@pytest.mark.parametrize("src", [U8, SHIFTED, S8, SIGNED], ids=["u8", "shifted", "s8", "signed"])
@pytest.mark.parametrize("other", [(0, 255), (-90, 165), (-255, 0)], ids=str)
@pytest.mark.parametrize(
    "dims",
    [((1, 12, 33, 64), (1, 12, 64, 35)), ((2, 33, 17), (2, 17, 35)), ((1, 3, 1, 5), (1, 3, 5, 1)), ((7, 1), (1, 9))],
    ids=str,
)
def test_a_second_factor_of_unsigned_numbers_is_stored_with_a_sign(src, other, dims):
    types = {"src": TensorType(dims[0]), "weights": TensorType(dims[1])}
    for post_ops in ((), ROUNDED):
        node = node_of("matmul", MatMul(), types, post_ops)
        grids = {"src": src, "weights": Grid((0.03,), *other, signed=True)}
        node = node.with_(grids={**grids, **({"dst": RESULT.grid} if post_ops else {})})
        found = [formatted for formatted in ways(node, types) if not formatted.choice.impl.startswith("ref")]
        assert found
        for formatted in found:
            assert formatted.choice.operands["weights"].dtype is DataType.S8
            assert check_node(formatted) is None, f"{formatted.choice.impl} {formatted.descs}"


def usual(src, dst):
    node, _ = convolution(src, post_ops=(PostOp("fake_quantize", dst),))
    found = with_usual_scales(node, {"src": src.stored, "weights": DataType.S8, "dst": DataType.U8})
    return found.grids, found.post_ops


def test_layers_that_differ_in_scales_are_one_problem():
    dst = FakeQuantize(0.3, -100, 155)
    assert usual(SHIFTED, RESULT) == usual(Grid((0.7,), -99, 156), dst)
    assert usual(U8, dst) != usual(SHIFTED, dst)  # no zero point
    assert usual(SHIFTED, FakeQuantize(0.3, -100, 100)) != usual(SHIFTED, dst)  # limits within a byte


@needs_vnni
@pytest.mark.parametrize("operand", [U8, SHIFTED, None], ids=["u8", "shifted", "f32"])
def test_a_residual_of_bytes_is_added_in_its_own_scale(operand):
    inner = PostOp("fake_quantize", FakeQuantize(0.9, -128, 127))
    added = PostOp("binary", Binary("add"), "post_op_1")
    node, types = convolution(post_ops=(inner, added, *ROUNDED))
    types = {**types, "post_op_1": node.results[0]}
    node = node.with_(grids={**node.grids, **({"post_op_1": operand} if operand else {})})
    found = [check_node(formatted) for formatted in ways(node, types)]
    assert found and set(found) == {None}


@needs_vnni
@pytest.mark.parametrize("src", [U8, S8, SHIFTED], ids=["u8", "s8", "shifted"])
@pytest.mark.parametrize(
    ("op", "attrs", "dims", "axes"),
    [
        ("inner_product", InnerProduct(), ((5, 40), (17, 40), (17,)), (0,)),
        ("matmul", MatMul(), ((7, 40), (40, 24), (1, 24)), (1,)),
        ("matmul", MatMul(), ((2, 7, 33), (33, 17), (1, 1, 17)), (1,)),
        ("matmul", MatMul(), ((2, 3, 8, 16), (2, 3, 16, 8), None), ()),
    ],
    ids=["inner_product", "matmul", "one_matrix", "heads"],
)
def test_every_product_of_bytes_is_exact(op, attrs, dims, axes, src):
    types = {name: TensorType(size) for name, size in zip(("src", "weights", "bias"), dims, strict=True) if size}
    node = node_of(op, attrs, types, ROUNDED)
    node = node.with_(grids={"src": src, "weights": weights_grid(dims[1], axes), "dst": RESULT.grid})
    found = {formatted.choice.impl: check_node(formatted) for formatted in ways(node, types)}
    assert set(found.values()) <= {None}, found
    assert found


@needs_vnni
def test_an_inner_product_of_images_has_a_scale_for_each_output():
    types = {"src": TensorType((1, 64, 1, 1)), "weights": TensorType((24, 64, 1, 1)), "bias": TensorType((24,))}
    node = node_of("inner_product", InnerProduct(), types, ROUNDED)
    node = node.with_(grids={"src": U8, "weights": weights_grid((24, 64, 1, 1)), "dst": RESULT.grid})
    found = {formatted.choice.impl: check_node(formatted) for formatted in ways(node, types)}
    assert found and set(found.values()) == {None}, found


@needs_vnni
def test_rows_with_a_zero_point_have_packed_weights():
    types = {"src": TensorType((128, 256)), "weights": TensorType((256, 192)), "bias": TensorType((1, 192))}
    node = node_of("matmul", MatMul(), types, ROUNDED)
    node = node.with_(grids={"src": SHIFTED, "weights": weights_grid((256, 192), (1,)), "dst": RESULT.grid})
    assert any(one.choice.operands["weights"].kind == "opaque" for one in ways(node, types))


@needs_vnni
@pytest.mark.parametrize("src", [U8, SHIFTED], ids=["u8", "shifted"])
def test_a_regrouped_product_with_an_operand_keeps_its_scales(src):
    types = {"src": TensorType((1, 40, 64)), "weights": TensorType((64, 96)), "post_op_1": TensorType((1, 1, 96))}
    tail = (
        PostOp("fake_quantize", FakeQuantize(0.9, -128, 127)),
        PostOp("binary", Binary("add"), "post_op_1"),
        *ROUNDED,
    )
    node = node_of("matmul", MatMul(), {name: types[name] for name in ("src", "weights")}, tail)
    grids = {"src": src, "weights": weights_grid((64, 96), (1,)), "dst": RESULT.grid, "post_op_1": Grid((0.3,), 0, 255)}
    found = {one.choice.impl: check_node(one) for one in ways(node.with_(grids=grids), types)}
    assert found and set(found.values()) == {None}, found


def test_maximum_pooling_moves_bytes():
    types = {"src": TensorType((2, 17, 8, 8))}
    node = node_of("pooling", Pooling.make("max", (3, 3), 2, pad_l=1), types).with_(
        grids={"src": SHIFTED, "dst": SHIFTED}
    )
    (request,) = in_bytes(node, free_request(node, types))
    assert {desc.dtype for desc in request.values()} == {DataType.U8}
    last = {name: MemoryDesc(desc.dims, desc.dtype, tag="acdb") for name, desc in request.items()}
    found = list(OneDnnTarget().candidates(node, last))
    assert found and scaling_of(node, {name: desc.dtype for name, desc in last.items()}).scales == {}


@pytest.mark.parametrize("grid, moves", [(U8, True), (S8, True), (SHIFTED, False)], ids=["u8", "s8", "shifted"])
def test_a_rectifier_moves_bytes_if_byte_0_is_zero(grid, moves):
    types = {"src": TensorType((2, 8, 4, 4))}
    node = node_of("resampling", Resampling("nearest", (8, 8)), types, (PostOp("eltwise", Eltwise("relu")),))
    node = node.with_(grids={"src": grid, "dst": grid})
    (request,) = in_bytes(node, free_request(node, types))
    plain = {name: MemoryDesc(desc.dims, desc.dtype) for name, desc in request.items()}
    assert bool(list(OneDnnTarget().candidates(node, plain))) == moves


def test_ranges_are_those_of_real_numbers():
    types, attrs = {"src": TensorType((3, 75))}, DynamicQuantize(0, 255, 255.0, whole=True)
    node = node_of("dynamic_quantize", attrs, types).with_(grids={"src": S8, "dst": attrs.grid})
    results = dict(zip(("dst", "scale", "zero"), node.results, strict=True))
    plain = {name: MemoryDesc(type_.dims, type_.dtype) for name, type_ in {**types, **results}.items()}
    requests = list(in_bytes(node, plain))
    assert {one["src"].dtype for one in requests} == {DataType.F32, DataType.S8}
    assert {one["src"].dtype for one in requests if list(kernels(node, one))} == {DataType.F32}


@pytest.mark.parametrize("grid", [U8, S8, SHIFTED], ids=["u8", "s8", "shifted"])
@pytest.mark.parametrize("to_bytes", [True, False], ids=["to bytes", "to reals"])
def test_a_reorder_between_bytes_and_reals_keeps_numbers(grid, to_bytes):
    dims = (2, 17, 5, 7)
    # in another order of axes, the compiled reorder forgets zero points
    bytes_, reals = MemoryDesc(dims, grid.stored, tag="abcd" if grid.zero else "acdb"), MemoryDesc(dims, "f32")
    src, dst = (reals, bytes_) if to_bytes else (bytes_, reals)
    node = node_of("reorder", Reorder(), {"src": TensorType(dims)}).with_(
        results=(TensorType(dims, dst.dtype),), grids={"src": grid, "dst": grid}
    )
    candidate = next(iter(OneDnnTarget().candidates(node, {"src": src, "dst": dst})))
    assert check_node(node.with_(descs=candidate.results, choice=candidate.choice("test"))) is None


# ---------------------------------------------------------------- without a library


def test_a_rounding_before_the_result_is_the_storing_of_bytes():
    node, _ = convolution(
        post_ops=(PostOp("eltwise", Eltwise("relu")), PostOp("fake_quantize", FakeQuantize(0.5, 0, 255)))
    )
    stored = {"src": DataType.U8, "weights": DataType.S8, "dst": DataType.U8}
    chain = chain_of(node, stored)
    assert (chain.steps, chain.dst_scale) == ([], 0.5)  # no byte is negative, so the ReLU is saturation
    chain = chain_of(node, {**stored, "dst": DataType.F32})
    assert [getattr(step, "alg", "relu") for step in chain.steps] == ["relu", "linear", "round", "clip", "linear"]


def test_neighbouring_scalings_are_one():
    inner, added = PostOp("fake_quantize", FakeQuantize(0.5, -128, 127)), PostOp("binary", Binary("add"), "post_op_1")
    node, _ = convolution(post_ops=(inner, added, PostOp("fake_quantize", FakeQuantize(2.0, 0, 255))))
    node = node.with_(grids={**node.grids, "post_op_1": Grid((0.25,), 0, 255)})
    stored = {"src": DataType.U8, "weights": DataType.S8, "dst": DataType.U8, "post_op_1": DataType.U8}
    chain = chain_of(node, stored)
    linear = Function("linear", 2.0, 0.0)
    assert chain.steps == [linear, Function("round", 0.0, 0.0), Function("clip", -128.0, 127.0), linear, Kept(1)]
    assert chain.dst_scale == 8.0  # a result of 2.0 in units of the operand, 0.25


def test_limits_within_a_byte_are_clipped():
    node, _ = convolution(post_ops=(PostOp("fake_quantize", FakeQuantize(0.5, 0, 127)),))
    chain = chain_of(node, {"src": DataType.U8, "weights": DataType.S8, "dst": DataType.U8})
    assert chain.steps[-1] == Function("clip", 0.0, 127.0)


def test_scales_of_products_are_one_number_for_each_output():
    node, _ = convolution()
    scaling = scaling_of(node, {"src": DataType.U8, "weights": DataType.S8, "dst": DataType.F32})
    assert scaling.scales["weights"] == tuple(0.02 * scale for scale in node.grids["weights"].scales)
    assert (scaling.masks, scaling.zeros) == ({"weights": 1}, {})


def test_scales_along_another_axis_than_the_outputs_are_refused():
    node, _ = convolution()
    node = node.with_(grids={**node.grids, "weights": weights_grid((32, 16, 3, 3), (1,))})
    with pytest.raises(UnsupportedOpError, match=r"vary along axes \(1,\), not \(0,\)"):
        scaling_of(node, {"src": DataType.U8, "weights": DataType.S8, "dst": DataType.F32})


def test_requests_for_bytes_and_reals():
    node, types = convolution(post_ops=ROUNDED)
    free = free_request(node, types)
    read = [{name: str(desc.dtype) for name, desc in request.items()} for request in in_bytes(node, free)]
    shared = {"src": "u8", "weights": "s8", "bias": "f32"}
    assert read == [{**shared, "dst": "u8"}, {**shared, "dst": "f32"}]
    assert in_reals(node, next(in_bytes(node, free))) == free
    assert list(in_bytes(node.with_(grids={"src": U8}), free)) == []


@pytest.mark.parametrize(
    "dims, read, written",
    [((2, 17, 8, 8), "abcd", "acdb"), ((2, 64, 5, 7), "acdb", "abcd"), ((1, 32, 35, 33), "aBcd16b", "abdc")],
)
def test_shifted_bytes_in_another_order_are_converted_elsewhere(dims, read, written):
    """oneDNN 3.2's compiled reorder forgets zero points of the last elements of a row."""
    node = node_of("reorder", Reorder(), {"src": TensorType(dims)})
    node = node.with_(results=(TensorType(dims, "u8"),), grids={"src": SHIFTED, "dst": SHIFTED})
    formats = {"src": MemoryDesc(dims, "f32", tag=read), "dst": MemoryDesc(dims, "u8", tag=written)}
    assert "forgets zero points" in str(known_bad((3, 2, 0), node, formats, "jit:uni"))
    alike = {**formats, "dst": MemoryDesc(dims, "u8", tag=read)}
    assert known_bad((3, 2, 0), node, alike, "jit:uni") is None
    even = {name: MemoryDesc((2, 20, 8, 8), desc.dtype, tag=desc.tag) for name, desc in formats.items()}
    assert known_bad((3, 2, 0), node, even, "jit:uni") is None
    for candidate in OneDnnTarget().candidates(node, formats):
        assert check_node(node.with_(descs=candidate.results, choice=candidate.choice("test"))) is None


@pytest.mark.parametrize(("kernel", "is_bad"), [(1, True), (2, False), (3, False)])
def test_known_bad_deconvolution_with_gaps(kernel, is_bad):
    types = {"src": TensorType((1, 16, 5, 5)), "weights": TensorType((32, 16, kernel, kernel))}
    node = node_of("deconvolution", Deconv.make(2, strides=2), types)
    formats = {name: MemoryDesc(types[name].dims, kind) for name, kind in (("src", "u8"), ("weights", "s8"))}
    found = known_bad((3, 2, 0), node, formats, "jit_deconvolution:avx512_core_vnni")
    assert ("smaller than its strides" in str(found)) == is_bad


@pytest.mark.parametrize(
    ("channels", "tail", "is_bad"), [(6, (1, 6, 5, 5), True), (8, (1, 8, 5, 5), False), (6, (1, 1, 1, 1), False)]
)
def test_known_bad_depthwise_convolution_with_a_part_of_a_vector(channels, tail, is_bad):
    types = {"src": TensorType((1, channels, 5, 5)), "weights": TensorType((channels, 1, 1, 3, 3))}
    node = node_of("convolution", Conv.make(2, pad_l=1, groups=channels), types)
    node = node.with_(post_ops=(PostOp("binary", Binary("add"), "post_op_0"),))
    formats = {name: MemoryDesc(types[name].dims, kind) for name, kind in (("src", "u8"), ("weights", "s8"))}
    formats["post_op_0"] = MemoryDesc(tail)
    assert ("part of a vector" in str(known_bad((3, 2, 0), node, formats, "jit_uni_int8:avx2"))) == is_bad
    assert known_bad((3, 2, 0), node, formats, "jit_dw:avx2") is None


def test_layers_that_differ_in_scales_alone_are_asked_about_in_any_formats():
    """One layer's request may leave formats open that another's gives: an implementation is found by both."""
    types = {"src": TensorType((40, 96)), "weights": TensorType((96, 128))}
    first, second = (
        node_of("matmul", MatMul(), types).with_(
            grids={"src": Grid((1.0,), 0, 255), "weights": Grid((scale,), -128, 127)}
        )
        for scale in (0.5, 0.25)
    )
    target, opened = OneDnnTarget(), free_request(first, types)
    given = {**opened, **{name: MemoryDesc(type_.dims, type_.dtype) for name, type_ in types.items()}}
    assert all(desc.kind == "any" for desc in opened.values())
    count = 0
    for node, request in ((first, opened), (second, given), (second, opened), (first, given)):
        for candidate in target.candidates(node, request):
            formatted = node.with_(descs=candidate.results, choice=candidate.choice("test"))
            assert check_node(formatted) is None, candidate
            count += 1
    assert count > 4
