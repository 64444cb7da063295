"""What oneDNN refuses, what is refused before it sees it, and the benchdnn lines."""

from __future__ import annotations

import pytest

from fmtprop import dnnl
from fmtprop.dnnl import NormFlags
from fmtprop.errors import DnnlError, ShapeError, UnsupportedOpError
from tests.dnnl.support import any_of, plain, tagged

INFER = "forward_inference"
DATA = (1, 16, 8, 8)


def convolution(**changes: object) -> dnnl.PrimitiveDesc:
    arguments: dict[str, object] = {
        "prop": INFER,
        "alg": "convolution_direct",
        "src": any_of(DATA),
        "weights": any_of((32, 16, 3, 3)),
        "bias": None,
        "dst": any_of((1, 32, 8, 8)),
        "strides": (1, 1),
        "dilates": (0, 0),
        "pad_l": (1, 1),
        "pad_r": (1, 1),
        **changes,
    }
    return dnnl.convolution_forward(**arguments)  # type: ignore[arg-type]


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


def test_unknown_names() -> None:
    with pytest.raises(UnsupportedOpError, match=r"no propagation kind 'inference'; known: .*forward_inference"):
        convolution(prop="inference")
    with pytest.raises(UnsupportedOpError, match=r"no algorithm 'direct'; known: .*convolution_direct"):
        convolution(alg="direct")


def test_axes_sizes_and_counts() -> None:
    desc = plain(DATA)
    with pytest.raises(ShapeError, match=r"softmax: axis 4 is not one of f32 1x16x8x8 abcd \(0 to 3\)"):
        dnnl.softmax_forward(INFER, "softmax_accurate", desc, desc, 4)
    with pytest.raises(ShapeError, match=r"concat: axis -1 is not one of"):
        dnnl.concat(None, -1, [desc])
    with pytest.raises(ShapeError, match=r"concat: at least one source is needed"):
        dnnl.concat(None, 0, [])
    with pytest.raises(ShapeError, match=r"sum: 2 sources need 2 scales, not 1"):
        dnnl.sum(None, [1.0], [desc, desc])
    with pytest.raises(ShapeError, match=r"shuffle group_size 4294967296 is out of range"):
        dnnl.shuffle_forward(INFER, desc, desc, 1, 2**32)
    with pytest.raises(ShapeError, match=r"lrn local_size -1 is out of range"):
        dnnl.lrn_forward(INFER, "lrn_across_channels", desc, desc, -1, 1.0, 1.0, 1.0)
    with pytest.raises(ShapeError, match=r"resampling factors \[2.0\]: .* needs 2, one per spatial axis"):
        dnnl.resampling_forward(INFER, "resampling_nearest", [2.0], desc, None)


def test_implementations() -> None:
    first = convolution()
    every = list(first.implementations())
    assert every[0] is first and [pd.index for pd in every] == list(range(len(every)))
    assert len({pd.impl for pd in every}) > 1
    # This object stays what it was, however often it is asked.
    impl, dst = first.impl, first.query_md("dst")
    following = [first.next_impl() for _ in range(2)]
    assert following[0] is not None and following[1] is not None
    assert following[0].impl == following[1].impl == every[1].impl
    assert following[0].index == following[1].index == 1
    fresh = first.clone()
    assert fresh.impl == first.impl == impl and fresh.query_md("dst") == dst
    assert every[-1].next_impl() is None and every[-1].is_reference


def test_next_impl_outlives_what_it_was_made_from() -> None:
    """Operands and hint are kept alive by the descriptor."""
    bwd = dnnl.convolution_backward_data(
        "convolution_direct",
        any_of(DATA),
        any_of((32, 16, 3, 3)),
        any_of((1, 32, 8, 8)),
        (1, 1),
        (0, 0),
        (1, 1),
        (1, 1),
        convolution(prop="forward_training"),
    )
    assert len(list(bwd.implementations())) >= 1


def lines() -> dict[str, dnnl.PrimitiveDesc]:
    data, nhwc, bias = plain(DATA), tagged(DATA, "acdb"), plain((32,))
    flags = NormFlags.USE_GLOBAL_STATS | NormFlags.USE_SCALE | NormFlags.USE_SHIFT
    window = (2, 2), (3, 3), (0, 0), (1, 1), (1, 1)
    rows = plain((3, 4, 20))
    pooled, wide = any_of((1, 16, 4, 4)), plain((3, 1, 5, 6))
    attr = dnnl.PrimitiveAttr(
        dnnl.PostOps().append_sum(0.5).append_binary("binary_add", plain((1, 32, 1, 1))).append_prelu(2), fpmath="bf16"
    )
    conv = convolution(bias=bias, attr=attr)
    matmul = dnnl.matmul(plain((4, 5)), any_of((5, 6)), plain((1, 6)), plain((4, 6)))
    return {
        "benchdnn --conv --dir=FWD_B --dt=f32:f32:f32 --stag=any --wtag=any --dtag=any --alg=direct "
        "--attr-fpmath=bf16 --attr-post-ops=sum:0.5:0+add:f32:2:abcd+prelu:per_oc --attr-scratchpad=user "
        "mb1ic16oc32ih8iw8oh8ow8kh3kw3sh1sw1ph1pw1dh0dw0": conv,
        "benchdnn --conv --dir=FWD_I --dt=f32:f32:f32 --stag=any --wtag=any --dtag=any --alg=direct "
        "--attr-scratchpad=user g2mb1ic16oc32ih8iw8oh8ow8kh3kw3sh1sw1ph1pw1dh0dw0": convolution(
            weights=any_of((2, 16, 8, 3, 3))
        ),
        "benchdnn --deconv --dir=FWD_I --dt=f32:f32:f32 --stag=any --wtag=any --dtag=any --alg=direct "
        "--attr-scratchpad=user mb1ic16oc32ih8iw8oh8ow8kh3kw3sh1sw1ph1pw1dh0dw0": dnnl.deconvolution_forward(
            INFER,
            "deconvolution_direct",
            any_of(DATA),
            any_of((32, 16, 3, 3)),
            None,
            any_of((1, 32, 8, 8)),
            (1, 1),
            (0, 0),
            (1, 1),
            (1, 1),
        ),
        "benchdnn --ip --dir=FWD_B --dt=f32:f32:f32 --stag=any --wtag=any --dtag=any --attr-scratchpad=user "
        "mb1ic16oc32ih8iw8": dnnl.inner_product_forward(
            INFER, any_of(DATA), any_of((32, 16, 8, 8)), bias, any_of((1, 32))
        ),
        "benchdnn --matmul --dt=f32:f32:f32 --stag=ab --wtag=any --dtag=ab --bia-dt=f32 --bia_mask=2 "
        "--attr-scratchpad=user 4x5:5x6": matmul,
        "benchdnn --pool --dir=FWD_I --dt=f32:f32 --tag=acdb --alg=max --attr-scratchpad=user "
        "mb1ic16ih8iw8oh4ow4kh3kw3sh2sw2ph1pw1dh0dw0": dnnl.pooling_forward(
            INFER, "pooling_max", nhwc, pooled, *window
        ),
        "benchdnn --eltwise --dir=FWD_I --dt=f32 --tag=acdb --alg=clip --alpha=0 --beta=6 --attr-scratchpad=user "
        "1x16x8x8": dnnl.eltwise_forward(INFER, "eltwise_clip", nhwc, nhwc, 0, 6),
        "benchdnn --bnorm --dir=FWD_I --dt=f32 --tag=acdb --flags=GCH --attr-scratchpad=user "
        "mb1ic16ih8iw8eps0.001": dnnl.batch_normalization_forward(INFER, nhwc, nhwc, 1e-3, flags),
        "benchdnn --lnorm --dir=FWD_D --dt=f32:f32 --tag=abc:abc --flags=CH --stat_tag=ab --attr-scratchpad=user "
        "3x4x20": dnnl.layer_normalization_forward(
            "forward_training", rows, rows, plain((3, 4)), 1e-5, NormFlags.USE_SCALE | NormFlags.USE_SHIFT
        ),
        "benchdnn --lrn --dir=FWD_I --dt=f32 --tag=abcd --alg=ACROSS --attr-scratchpad=user "
        "mb1ic16ih8iw8ls5alpha0.0001beta0.75k1": dnnl.lrn_forward(
            INFER, "lrn_across_channels", data, data, 5, 1e-4, 0.75, 1.0
        ),
        "benchdnn --softmax --dir=FWD_I --sdt=f32 --ddt=f32 --stag=abcd --dtag=abcd --alg=LOGSOFTMAX --axis=1 "
        "--attr-scratchpad=user 1x16x8x8": dnnl.softmax_forward(INFER, "softmax_log", data, data, 1),
        "benchdnn --binary --sdt=f32:f32 --ddt=f32 --stag=abcd:abcd --dtag=any --alg=mul --attr-scratchpad=user "
        "1x16x8x8:1x16x1x1": dnnl.binary("binary_mul", data, plain((1, 16, 1, 1)), any_of(DATA)),
        "benchdnn --sum --sdt=f32:f32 --ddt=f32 --stag=abcd:acdb --dtag=any --scales=1:0.5 --attr-scratchpad=user "
        "1x16x8x8": dnnl.sum(None, [1, 0.5], [data, nhwc]),
        "benchdnn --concat --sdt=f32:f32 --ddt=f32 --stag=abcd:acdb --dtag=any --axis=1 --attr-scratchpad=user "
        "1x16x8x8:1x16x8x8": dnnl.concat(None, 1, [data, nhwc]),
        "benchdnn --reduction --sdt=f32 --ddt=f32 --stag=abcd --dtag=any --alg=norm_lp_sum --p=2 --eps=0.5 "
        "--attr-scratchpad=user 1x16x8x8:1x16x1x1": dnnl.reduction(
            "reduction_norm_lp_sum", data, any_of((1, 16, 1, 1)), 2, 0.5
        ),
        "benchdnn --resampling --dir=FWD_I --sdt=f32 --ddt=f32 --tag=abcd --alg=linear --attr-scratchpad=user "
        "mb1ic16ih8iw8oh16ow16": dnnl.resampling_forward(INFER, "resampling_linear", (2, 2), data, None),
        "benchdnn --shuffle --dir=FWD_I --dt=f32 --tag=acdb --axis=1 --group=4 --attr-scratchpad=user "
        "1x16x8x8": dnnl.shuffle_forward(INFER, nhwc, nhwc, 1, 4),
        "benchdnn --reorder --sdt=f32 --ddt=f32 --stag=any --dtag=abcd --attr-scratchpad=user "
        "3x1x5x6  # without a tag: src strided": dnnl.reorder(
            tagged((3, 32, 5, 6), "acdb").submemory((3, 1, 5, 6), (0, 4, 0, 0)), wide
        ),
        "benchdnn --prelu --dir=FWD_I --sdt=f32:f32 --stag=abcd:any --attr-scratchpad=user "
        "1x16x8x8:1x16x1x1": dnnl.prelu_forward(INFER, data, any_of((1, 16, 1, 1)), data),
    }


def test_benchdnn_lines() -> None:
    for line, pd in lines().items():
        if "without a tag" in line:
            assert pd.repro.startswith(line.removesuffix("strided")), pd.repro
        else:
            assert pd.repro == line
