"""Convolution and deconvolution.

Every constructor takes operands as `NativeDesc` (None where an optional one is absent) and returns a
`PrimitiveDesc`. Dilation is oneDNN's: 0 is dense.

References
----------
oneapi/dnnl/dnnl.h, ``dnnl_*_primitive_desc_create``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fmtprop.dnnl.attr import PrimitiveAttr
from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.enums import algorithm, prop_kind
from fmtprop.dnnl.primitive import PrimitiveDesc, create
from fmtprop.dnnl.problem import window


def convolution_forward(
    prop: str,
    alg: str,
    src: NativeDesc,
    weights: NativeDesc,
    bias: NativeDesc | None,
    dst: NativeDesc,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward convolution.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    alg : str
        ``"convolution_direct"``, ``"convolution_winograd"`` or ``"convolution_auto"``.
    src, weights, dst : NativeDesc
        (N, IC, spatial), (OC, IC, window) or grouped (G, OC/G, IC/G, window), (N, OC, spatial).
    bias : NativeDesc or None
        (OC,).
    strides, dilates, pad_l, pad_r : sequence of int
        One entry per spatial axis.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If a window parameter has the wrong number of entries.

    Examples
    --------
    >>> from fmtprop import dnnl
    >>> from fmtprop.layout import MemoryDesc
    >>> src, weights, dst = (
    ...     dnnl.NativeDesc.from_desc(MemoryDesc.any(dims, "f32"))
    ...     for dims in [(1, 16, 8, 8), (32, 16, 3, 3), (1, 32, 8, 8)]
    ... )
    >>> pd = dnnl.convolution_forward(
    ...     "forward_inference", "convolution_direct", src, weights, None, dst, (1, 1), (0, 0), (1, 1), (1, 1)
    ... )
    >>> pd.query_md("dst").dims
    (1, 32, 8, 8)
    """
    return _window_forward(
        "convolution", "conv", prop, alg, src, weights, bias, dst, strides, dilates, pad_l, pad_r, attr
    )


def deconvolution_forward(
    prop: str,
    alg: str,
    src: NativeDesc,
    weights: NativeDesc,
    bias: NativeDesc | None,
    dst: NativeDesc,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward deconvolution (transposed convolution).

    Parameters are those of `convolution_forward`, with ``alg`` ``"deconvolution_direct"`` or ``…_winograd``. Weights
    are (OC, IC, window): PyTorch's with the first two axes exchanged.

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If a window parameter has the wrong number of entries.
    """
    return _window_forward(
        "deconvolution", "deconv", prop, alg, src, weights, bias, dst, strides, dilates, pad_l, pad_r, attr
    )


def convolution_backward_data(
    alg: str,
    diff_src: NativeDesc,
    weights: NativeDesc,
    diff_dst: NativeDesc,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a convolution by its source.

    Parameters are those of `convolution_forward`; ``hint_fwd_pd`` is the forward_training primitive's descriptor.

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If a window parameter has the wrong number of entries.
    """
    return _window_backward_data(
        "convolution", "conv", alg, diff_src, weights, diff_dst, strides, dilates, pad_l, pad_r, hint_fwd_pd, attr
    )


def deconvolution_backward_data(
    alg: str,
    diff_src: NativeDesc,
    weights: NativeDesc,
    diff_dst: NativeDesc,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a deconvolution by its source.

    Parameters are those of `convolution_backward_data`.

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If a window parameter has the wrong number of entries.
    """
    return _window_backward_data(
        "deconvolution", "deconv", alg, diff_src, weights, diff_dst, strides, dilates, pad_l, pad_r, hint_fwd_pd, attr
    )


def convolution_backward_weights(
    alg: str,
    src: NativeDesc,
    diff_weights: NativeDesc,
    diff_bias: NativeDesc | None,
    diff_dst: NativeDesc,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a convolution by its weights and bias.

    Parameters are those of `convolution_forward`; ``hint_fwd_pd`` is the forward_training primitive's descriptor.

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If a window parameter has the wrong number of entries.
    """
    operands = (src, diff_weights, diff_bias, diff_dst)
    return _window_backward_weights(
        "convolution", "conv", alg, operands, strides, dilates, pad_l, pad_r, hint_fwd_pd, attr
    )


def deconvolution_backward_weights(
    alg: str,
    src: NativeDesc,
    diff_weights: NativeDesc,
    diff_bias: NativeDesc | None,
    diff_dst: NativeDesc,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a deconvolution by its weights and bias.

    Parameters are those of `convolution_backward_weights`.

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If a window parameter has the wrong number of entries.
    """
    operands = (src, diff_weights, diff_bias, diff_dst)
    return _window_backward_weights(
        "deconvolution", "deconv", alg, operands, strides, dilates, pad_l, pad_r, hint_fwd_pd, attr
    )


def _window_forward(
    function: str,
    driver: str,
    prop: str,
    alg: str,
    src: NativeDesc,
    weights: NativeDesc,
    bias: NativeDesc | None,
    dst: NativeDesc,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    attr: PrimitiveAttr | None,
) -> PrimitiveDesc:
    operands: dict[str, NativeDesc | None] = {"src": src, "weights": weights, "bias": bias, "dst": dst}
    arguments = (
        prop_kind(prop),
        algorithm(alg),
        *operands.values(),
        *_windows(src, strides, dilates, pad_l, pad_r),
    )
    params = _params(prop, alg, strides, dilates, pad_l, pad_r)
    return create(f"{function}_forward", driver, operands, params, arguments, attr)


def _window_backward_data(
    function: str,
    driver: str,
    alg: str,
    diff_src: NativeDesc,
    weights: NativeDesc,
    diff_dst: NativeDesc,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None,
) -> PrimitiveDesc:
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "weights": weights, "diff_dst": diff_dst}
    windows = _windows(diff_src, strides, dilates, pad_l, pad_r)
    arguments = (algorithm(alg), *operands.values(), *windows, hint_fwd_pd)
    params = _params("backward_data", alg, strides, dilates, pad_l, pad_r)
    return create(f"{function}_backward_data", driver, operands, params, arguments, attr)


def _window_backward_weights(
    function: str,
    driver: str,
    alg: str,
    descs: tuple[NativeDesc, NativeDesc, NativeDesc | None, NativeDesc],
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None,
) -> PrimitiveDesc:
    operands = dict(zip(("src", "diff_weights", "diff_bias", "diff_dst"), descs, strict=True))
    windows = _windows(descs[0], strides, dilates, pad_l, pad_r)
    arguments = (algorithm(alg), *descs, *windows, hint_fwd_pd)
    params = _params("backward_weights", alg, strides, dilates, pad_l, pad_r)
    return create(f"{function}_backward_weights", driver, operands, params, arguments, attr)


def _windows(
    data: NativeDesc,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
) -> tuple[object, ...]:
    names = {"strides": strides, "dilates": dilates, "pad_l": pad_l, "pad_r": pad_r}
    return tuple(window(values, name, data) for name, values in names.items())


def _params(
    prop: str,
    alg: str,
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
) -> dict[str, object]:
    return {
        "prop": prop,
        "alg": alg,
        "strides": tuple(strides),
        "dilates": tuple(dilates),
        "pad_l": tuple(pad_l),
        "pad_r": tuple(pad_r),
    }
