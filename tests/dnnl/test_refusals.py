"""What oneDNN refuses, and what is refused before it sees it."""

from __future__ import annotations

from typing import Any

import pytest

from fmtprop import dnnl
from fmtprop.errors import DnnlError, InputError, ShapeError, UnsupportedOpError
from fmtprop.layout import MemoryDesc
from tests.dnnl.support import SAME, any_of, plain

DATA = (1, 16, 8, 8)


def convolution(
    attr: dnnl.PrimitiveAttr | None = None, hint: dnnl.PrimitiveDesc | None = None, **changes: Any
) -> dnnl.PrimitiveDesc:
    descs = {"src": any_of(DATA), "weights": any_of((32, 16, 3, 3)), "dst": any_of((1, 32, 8, 8))}
    return dnnl.create(dnnl.Convolution(**{**descs, **SAME, **changes}), attr, hint)


def test_refusal_names_operands_parameters_and_benchdnn() -> None:
    attr = dnnl.PrimitiveAttr(dnnl.PostOps().append_eltwise("eltwise_relu"))
    with pytest.raises(DnnlError) as info:
        convolution(pad_r=(5, 1), attr=attr)
    message = str(info.value)
    assert message.startswith("dnnl_convolution_forward_primitive_desc_create answered invalid_arguments: src f32 ")
    assert "weights f32 32x16x3x3 any" in message and "pad_r=(5, 1)" in message
    assert "post-ops eltwise eltwise_relu" in message
    assert "the dimensions or parameters do not fit each other" in message
    assert info.value.repro.startswith("benchdnn --conv --dir=FWD_I --dt=f32:f32:f32 --stag=any")
    assert info.value.repro.endswith("mb1ic16oc32ih8iw8oh8ow8kh3kw3sh1sw1ph1pw1dh0dw0")
    assert "--attr-post-ops=relu:0:0" in info.value.repro


def test_unimplemented_has_a_remedy() -> None:
    with pytest.raises(DnnlError, match=r"answered unimplemented: .*use `any`, a plain format, or f32"):
        desc = any_of((1, 32, 8, 8), "f64")
        convolution(src=any_of(DATA, "f64"), weights=any_of((32, 16, 3, 3), "f64"), dst=desc)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strides": (1,)}, r"strides \[1\]: f32 1x16x8x8 any has 2 spatial axes, so 2 entries are needed"),
        ({"pad_l": (1, 1, 1)}, r"pad_l \[1, 1, 1\]: .* 2 entries are needed"),
        ({"dilates": (2**40, 0)}, r"dilates \[1099511627776, 0\]: 1099511627776 is out of range"),
    ],
)
def test_windows_are_checked_before_onednn(change: dict[str, object], message: str) -> None:
    """oneDNN would read beyond a short array."""
    with pytest.raises(ShapeError, match=message):
        convolution(**change)


@pytest.mark.parametrize("strides", [(0, 0), (1, 0), (0, 1)])
def test_an_inner_product_reads_no_element_twice(strides: tuple[int, int]) -> None:
    """oneDNN would divide by a stride of 0, which ends the process."""
    src = dnnl.NativeDesc.from_desc(MemoryDesc((4, 36), "f32", strides=strides))
    with pytest.raises(UnsupportedOpError, match=r"src is f32\[4,36\]:\S+, which repeats elements by a stride of 0"):
        dnnl.create(dnnl.InnerProduct(src=src, weights=any_of((32, 36)), dst=any_of((4, 32))))


def test_a_recurrent_layer_reads_no_element_twice() -> None:
    """oneDNN would refuse some when they run; others end the process."""
    src = dnnl.NativeDesc.from_desc(MemoryDesc((3, 2, 24), "f32", strides=(0, 0, 1)))
    layer = dnnl.LbrGru(
        src_layer=src,
        weights_layer=any_of((1, 1, 24, 3, 5)),
        weights_iter=any_of((1, 1, 5, 3, 5)),
        bias=any_of((1, 1, 4, 5)),
        dst_layer=any_of((3, 2, 5)),
        direction="unidirectional_left2right",
    )
    with pytest.raises(UnsupportedOpError, match=r"src_layer is f32\[3,2,24\]:\S+, which repeats elements"):
        dnnl.create(layer)


def test_unknown_names() -> None:
    with pytest.raises(UnsupportedOpError, match=r"no propagation kind 'inference'; known: .*forward_inference"):
        convolution(prop="inference")
    with pytest.raises(UnsupportedOpError, match=r"no algorithm 'direct'; known: .*convolution_direct"):
        convolution(alg="direct")


def test_axes_sizes_and_counts() -> None:
    desc = plain(DATA)
    with pytest.raises(ShapeError, match=r"softmax: axis 4 is not one of f32 1x16x8x8 abcd \(0 to 3\)"):
        dnnl.create(dnnl.Softmax(src=desc, dst=desc, axis=4))
    with pytest.raises(ShapeError, match=r"concat: axis -1 is not one of"):
        dnnl.create(dnnl.Concat(srcs=[desc], axis=-1))
    with pytest.raises(ShapeError, match=r"concat: at least one source is needed"):
        dnnl.create(dnnl.Concat(srcs=[], axis=0))
    with pytest.raises(ShapeError, match=r"sum: 2 sources need 2 scales, not 1"):
        dnnl.create(dnnl.Sum(srcs=[desc, desc], scales=[1.0]))
    with pytest.raises(ShapeError, match=r"shuffle group_size 4294967296 is out of range"):
        dnnl.create(dnnl.Shuffle(src=desc, dst=desc, axis=1, group_size=2**32))
    with pytest.raises(ShapeError, match=r"lrn local_size -1 is out of range"):
        dnnl.create(dnnl.Lrn(src=desc, dst=desc, alg="lrn_across_channels", local_size=-1, alpha=1, beta=1, k=1))
    with pytest.raises(ShapeError, match=r"resampling factors \[2.0\]: .* needs 2, one per spatial axis"):
        dnnl.create(dnnl.Resampling(src=desc, alg="resampling_nearest", factors=[2.0]))


def test_implementations() -> None:
    first = convolution()
    every = list(first.implementations())
    assert every[0] is first and [pd.index for pd in every] == list(range(len(every)))
    assert len({pd.impl for pd in every}) > 1
    # This object stays what it was, however often it is asked.
    impl, dst = first.impl, first.query_md("dst")
    following = [list(first.implementations())[1] for _ in range(2)]
    assert following[0].impl == following[1].impl == every[1].impl
    assert following[0].index == following[1].index == 1
    fresh = first.clone()
    assert fresh.impl == first.impl == impl and fresh.query_md("dst") == dst
    assert list(every[-1].implementations()) == every[-1:] and every[-1].is_reference


def test_an_implementation_outlives_what_it_was_made_from() -> None:
    """Operands and hint are kept alive by the descriptor."""
    descs = {"src": None, "diff_src": any_of(DATA), "dst": None, "diff_dst": any_of((1, 32, 8, 8))}
    bwd = convolution(prop="backward_data", **descs, hint=convolution(prop="forward_training"))
    assert len(list(bwd.implementations())) >= 1


def test_operands_that_are_missing_or_of_another_direction() -> None:
    """oneDNN would see a null pointer, or nothing of them."""
    src, dst = any_of(DATA), any_of((1, 32, 8, 8))
    with pytest.raises(InputError, match=r"convolution \(forward_inference\) needs operand weights; given: src f32 "):
        dnnl.create(dnnl.Convolution(src=src, dst=dst, **SAME))
    message = r"convolution \(forward_inference\) takes no operand diff_src; it takes src, weights, bias, dst"
    with pytest.raises(InputError, match=message):
        convolution(diff_src=src)
    with pytest.raises(InputError, match=r"softmax \(backward_data\) needs operand dst; given: diff_src f32 1x16x8x8"):
        forward = dnnl.Softmax(prop="forward_training", src=plain(DATA), dst=plain(DATA), axis=1)
        gradient = dnnl.Softmax(prop="backward_data", diff_src=plain(DATA), diff_dst=plain(DATA), axis=1)
        dnnl.create(gradient, hint=dnnl.create(forward))


def test_hints_where_there_are_none() -> None:
    with pytest.raises(DnnlError, match=r"a forward_inference convolution takes no hint"):
        convolution(hint=convolution(prop="forward_training"))
    with pytest.raises(UnsupportedOpError, match=r"matmul has no propagation kind 'backward'; known: ''"):
        desc = plain((4, 4))
        dnnl.create(dnnl.Matmul(prop="backward", src=desc, weights=desc, dst=desc))


@pytest.mark.parametrize(
    ("dims", "shape"), [((4, 8), "mb4ic8"), ((4,), "mb4ic1"), ((1, 2, 3, 4, 5, 6), "mb1ic2i?3id4ih5iw6")]
)
def test_ranks_that_benchdnn_has_no_problem_of(dims: tuple[int, ...], shape: str) -> None:
    """Making the line must not fail: oneDNN's own refusal is what the user has to see."""
    desc = plain(dims, "f64")
    with pytest.raises(DnnlError, match=r"batch_normalization_forward_primitive_desc_create answered") as info:
        dnnl.create(dnnl.BatchNormalization(src=desc, dst=desc, epsilon=1e-3))
    assert info.value.repro.startswith("benchdnn --bnorm --dir=FWD_I --dt=f64 --tag=a")
    assert info.value.repro.endswith(f"--attr-scratchpad=user {shape}eps0.001")


def test_refusal_of_a_sequence_of_another_rank() -> None:
    rows, weights = plain((3, 5)), any_of((5, 4, 5))
    with pytest.raises(DnnlError, match=r"lstm_forward_primitive_desc_create answered .*src_layer f32 3x5"):
        dnnl.create(dnnl.Lstm(src_layer=rows, weights_layer=weights, weights_iter=weights, dst_layer=rows))
