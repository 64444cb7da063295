from __future__ import annotations

import pytest
import torch

from fmtprop.errors import FormatError, ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc, pack, unpack
from fmtprop.ops import OPSET, Expand, Permute, Reshape, Slice, emit
from tests.ops.fake_call import FakeCall, check_import, random_tensor

VIEWS = ("reshape", "permute", "slice", "expand")
X = TensorType((2, 6, 4, 5))

CASES = [(op, sample) for op in VIEWS for sample in OPSET[op].samples()]


def formats(type_: TensorType) -> list[MemoryDesc]:
    letters = "abcde"[: type_.ndim]
    tags = [letters, letters[0] + letters[2:] + letters[1:2], letters[::-1]]
    if type_.ndim > 1:
        tags += [f"a{letters[1].upper()}{letters[2:]}8b", f"A{letters[1].upper()}{letters[2:]}4a8b"]
    return [MemoryDesc(type_.dims, type_.dtype, tag=tag) for tag in tags]


def test_a_view_of_a_format_is_made_once():
    rule, (result,) = OPSET["reshape"].view.dst, OPSET["reshape"].infer(Reshape((2, 6, 20)), {"src": X})
    views = [rule(Reshape((2, 6, 20)), MemoryDesc(X.dims), result) for _ in range(2)]
    assert views[0] is views[1]


@pytest.mark.parametrize(("op", "sample"), CASES, ids=[f"{op}-{sample.name}" for op, sample in CASES])
def test_a_view_reads_the_same_elements_or_refuses(op, sample):
    declaration = OPSET[op]
    (result,) = declaration.infer(sample.attrs, sample.types)
    source = random_tensor(sample.types["src"])
    (expected,) = declaration.reference(sample.attrs, {"src": source})
    assert tuple(expected.shape) == result.dims
    taken, backwards = 0, min(getattr(sample.attrs, "steps", (1,))) < 0
    for desc in formats(sample.types["src"]):
        try:
            view = declaration.view.dst(sample.attrs, desc, result)
        except FormatError:
            plain = desc.tag == formats(sample.types["src"])[0].tag
            assert backwards or not plain, "the plain format takes every view that goes forward"
            continue
        taken += 1
        assert (unpack(pack(source.numpy(), desc), view) == expected.numpy()).all()
    assert (taken == 0) == backwards


def test_blocked_channels_survive_what_leaves_them_alone():
    blocked = MemoryDesc((2, 32, 4, 4), tag="aBcd16b")
    view = {op: OPSET[op].view.dst for op in VIEWS}
    assert view["reshape"](Reshape((2, 32, 16)), blocked, TensorType((2, 32, 16))).tag == "aBc16b"
    assert view["permute"](Permute((0, 2, 3, 1)), blocked, TensorType((2, 4, 4, 32))).inner_blocks == ((3, 16),)
    window = Slice((0, 16, 0, 0), (2, 16, 4, 4), (1, 1, 1, 1))
    assert view["slice"](window, blocked, TensorType((2, 16, 4, 4))).offset0 == 4 * 4 * 16
    with pytest.raises(FormatError, match="is blocked by 16"):
        view["reshape"](Reshape((2, 512)), blocked, TensorType((2, 512)))


def test_permute_follows_torch_and_not_onednn():
    result = OPSET["permute"].view.dst(Permute((2, 0, 1)), MemoryDesc((2, 3, 4), tag="abc"), TensorType((4, 2, 3)))
    assert (result.dims, result.strides) == ((4, 2, 3), (1, 12, 4))


def test_an_empty_result_is_plain():
    blocked = MemoryDesc((0, 32, 4, 4), tag="aBcd16b")
    view = OPSET["reshape"].view.dst(Reshape((0, 512)), blocked, TensorType((0, 512)))
    assert view == MemoryDesc((0, 512), tag="ab")


ERRORS = [
    ("reshape", lambda: Reshape((2, 7)), "has 240 elements but shape .2, 7. holds 14"),
    ("reshape", lambda: Reshape((2, -1)), r"shape\[1\] is -1; it must be a non-negative int"),
    ("permute", lambda: Permute((0, 0, 1)), "must hold each of 0 to 2 exactly once"),
    ("permute", lambda: Permute((1, 0)), "must have one entry per axis of src, which has 4"),
    ("slice", lambda: Slice((0,), (1,), (0,)), r"steps\[0\] is 0; a step must be an int other than 0"),
    ("slice", lambda: Slice((0, 0), (1,), (1,)), "must have one entry per axis"),
    (
        "slice",
        lambda: Slice((0, 4, 0, 0), (2, 2, 4, 5), (1, 2, 1, 1)),
        "src axis 1 has size 6 but the slice reads index 6",
    ),
    ("expand", lambda: Expand((2, 6, 4, 7)), "src axis 3 has size 5 and cannot be expanded to 7"),
    ("expand", lambda: Expand((2, 6)), "src has 4 dimensions but expand's shape"),
]


@pytest.mark.parametrize(("op", "attrs", "message"), ERRORS)
def test_errors_name_axis_value_and_rule(op, attrs, message):
    graph = Graph()
    x = graph.input("x", X)
    with pytest.raises(ShapeError, match=message):
        emit(graph, op, {"src": x}, attrs())


IMPORTS = [
    ("aten.view.default", (X, [2, -1]), ["reshape"]),
    ("aten.reshape.default", (X, [4, 60]), ["reshape"]),
    ("aten._unsafe_view.default", (X, [12, 20]), ["reshape"]),
    ("aten.flatten.using_ints", (X, 1, -1), ["reshape"]),
    ("aten.flatten.using_ints", (TensorType((3, 4)), 1), []),
    ("aten.unflatten.int", (X, 1, [2, -1]), ["reshape"]),
    ("aten.squeeze.default", (TensorType((1, 3, 1)),), ["reshape"]),
    ("aten.squeeze.dim", (TensorType((1, 3, 1)), -1), ["reshape"]),
    ("aten.squeeze.dim", (X, 1), []),
    ("aten.squeeze.dims", (TensorType((1, 3, 1)), [0, 2]), ["reshape"]),
    ("aten.unsqueeze.default", (X, -1), ["reshape"]),
    ("aten.transpose.int", (X, 1, -1), ["permute"]),
    ("aten.transpose.int", (X, 2, 2), []),
    ("aten.t.default", (TensorType((3, 4)),), ["permute"]),
    ("aten.t.default", (TensorType((3,)),), []),
    ("aten.permute.default", (X, [0, 2, -1, 1]), ["permute"]),
    ("aten.movedim.int", (X, 1, -1), ["permute"]),
    ("aten.movedim.intlist", (X, [0, 1], [3, 0]), ["permute"]),
    ("aten.mT.default", (X,), ["permute"]),
    ("aten.pixel_shuffle.default", (TensorType((2, 18, 4, 5)), 3), ["reshape", "permute", "reshape"]),
    ("aten.pixel_shuffle.default", (TensorType((12, 3, 5)), 2), ["reshape", "permute", "reshape"]),
    ("aten.pixel_unshuffle.default", (TensorType((2, 3, 6, 9)), 3), ["reshape", "permute", "reshape"]),
    ("aten.slice.Tensor", (X, 1, 1, 2**63 - 1, 2), ["slice"]),
    ("aten.slice.Tensor", (X, 1, -2), ["slice"]),
    ("aten.slice.Tensor", (X, 2), []),
    ("aten.slice.Tensor", (X, 2, 3, 1), ["slice"]),
    ("aten.select.int", (X, 1, -1), ["slice", "reshape"]),
    ("aten.narrow.default", (X, 1, -4, 3), ["slice"]),
    ("aten.split.Tensor", (X, 4, 1), ["slice", "slice"]),
    ("aten.split_with_sizes.default", (X, [1, 2, 3], 1), ["slice"] * 3),
    ("aten.chunk.default", (X, 4, 3), ["slice"] * 3),
    ("aten.tensor_split.sections", (X, 4, 1), ["slice"] * 4),
    ("aten.unbind.int", (X,), ["slice", "slice", "reshape", "reshape"]),
    ("aten.expand.default", (TensorType((1, 3, 1)), [4, 2, -1, 5]), ["expand"]),
    ("aten.expand_as.default", (TensorType((6, 1, 1)), X), ["expand"]),
    ("aten.repeat.default", (TensorType((3, 1)), [2, 1, 4]), ["reshape", "expand"]),
    ("aten.repeat.default", (X, [1, 2, 1, 3]), ["reshape", "expand", "reshape"]),
    ("aten.repeat.default", (X, [1, 1, 1, 1]), []),
    ("aten.tile.default", (X, [2]), ["reshape", "expand", "reshape"]),
    ("aten.tile.default", (TensorType((3,)), [2, 2]), ["reshape", "expand", "reshape"]),
    ("aten.repeat_interleave.self_int", (X, 3, 1), ["reshape", "expand", "reshape"]),
    ("aten.repeat_interleave.self_int", (TensorType((2, 3)), 2), ["reshape", "expand", "reshape"]),
    ("aten.contiguous.default", (X,), []),
    ("aten.clone.default", (TensorType((2,), "s64"),), []),
    ("aten.detach.default", (X,), []),
    ("aten.dropout.default", (X, 0.5, False), []),
    ("aten.native_dropout.default", (X, 0.5, False), []),
    ("aten.transpose.int", (TensorType((2, 3), "boolean"), 0, 1), ["permute"]),
]


@pytest.mark.parametrize(("target", "args", "ops"), IMPORTS)
def test_importers_agree_with_torch(target, args, ops):
    assert sorted(check_import(target, *args).ops()) == sorted(ops)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.dropout.default", (X, 0.5, True)),
        ("aten.native_dropout.default", (X, 0.5, True)),
        ("aten.repeat.default", (X, [1, 0, 1, 1])),  # nothing is left
        ("aten.repeat.default", (TensorType((2,) * 7), [2] * 7)),  # more axes than a tensor may have
        ("aten.tensor_split.indices", (X, [3, 1], 1)),
    ],
)
def test_importers_decline_what_is_no_view(target, args):
    assert FakeCall(target, *args).run() is None


def test_an_identity_is_the_argument_itself():
    call = FakeCall("aten.alias.default", X)
    assert call.run() == Value("x0")


def test_references_take_any_dtype():
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        (result,) = OPSET["slice"].reference(Slice((1,), (2,), (2,)), {"src": torch.ones(5, dtype=dtype)})
        assert result.shape == (2,)
        assert result.dtype == dtype
