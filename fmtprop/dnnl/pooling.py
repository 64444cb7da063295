"""Primitives over windows without weights: pooling and local response normalization.

Every constructor takes operands as `NativeDesc` and returns a `PrimitiveDesc`. Dilation is oneDNN's: 0 is dense.

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
from fmtprop.dnnl.problem import checked_size, window


def pooling_forward(
    prop: str,
    alg: str,
    src: NativeDesc,
    dst: NativeDesc,
    strides: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward pooling.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"`` (max then has a workspace).
    alg : str
        ``"pooling_max"``, ``"pooling_avg_include_padding"`` or ``"pooling_avg_exclude_padding"``.
    src, dst : NativeDesc
        (N, C, spatial).
    strides, kernel, dilation, pad_l, pad_r : sequence of int
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
    """
    windows, params = _windows(src, prop, alg, strides, kernel, dilation, pad_l, pad_r)
    arguments = (prop_kind(prop), algorithm(alg), src, dst, *windows)
    return create("pooling_forward", "pool", {"src": src, "dst": dst}, params, arguments, attr)


def pooling_backward(
    alg: str,
    diff_src: NativeDesc,
    diff_dst: NativeDesc,
    strides: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a pooling.

    Parameters are those of `pooling_forward`. Max pooling needs the workspace of the forward_training primitive
    whose descriptor is ``hint_fwd_pd``, and refuses another implementation's.

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
    windows, params = _windows(diff_src, "backward_data", alg, strides, kernel, dilation, pad_l, pad_r)
    arguments = (algorithm(alg), diff_src, diff_dst, *windows, hint_fwd_pd)
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "diff_dst": diff_dst}
    return create("pooling_backward", "pool", operands, params, arguments, attr)


def lrn_forward(
    prop: str,
    alg: str,
    src: NativeDesc,
    dst: NativeDesc,
    local_size: int,
    alpha: float,
    beta: float,
    k: float,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward local response normalization.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"`` (with a workspace).
    alg : str
        ``"lrn_across_channels"`` or ``"lrn_within_channel"``.
    src, dst : NativeDesc
    local_size : int
        Size of the window.
    alpha, beta, k : float
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If ``local_size`` is out of range.
    """
    params = {"prop": prop, "alg": alg, "local_size": local_size, "alpha": alpha, "beta": beta, "k": k}
    size = checked_size(local_size, "lrn local_size")
    arguments = (prop_kind(prop), algorithm(alg), src, dst, size, alpha, beta, k)
    return create("lrn_forward", "lrn", {"src": src, "dst": dst}, params, arguments, attr)


def lrn_backward(
    alg: str,
    diff_src: NativeDesc,
    diff_dst: NativeDesc,
    src: NativeDesc,
    local_size: int,
    alpha: float,
    beta: float,
    k: float,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a local response normalization.

    Parameters are those of `lrn_forward`; ``hint_fwd_pd`` is the forward_training primitive's descriptor.

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If ``local_size`` is out of range.
    """
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "diff_dst": diff_dst, "src": src}
    params = {"prop": "backward_data", "alg": alg, "local_size": local_size, "alpha": alpha, "beta": beta, "k": k}
    size = checked_size(local_size, "lrn local_size")
    descs = (diff_src, diff_dst, src)
    arguments = (algorithm(alg), *descs, size, alpha, beta, k, hint_fwd_pd)
    return create("lrn_backward", "lrn", operands, params, arguments, attr)


def _windows(
    data: NativeDesc,
    prop: str,
    alg: str,
    strides: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
) -> tuple[tuple[object, ...], dict[str, object]]:
    names = {"strides": strides, "kernel": kernel, "dilation": dilation, "pad_l": pad_l, "pad_r": pad_r}
    arrays = tuple(window(values, name, data) for name, values in names.items())
    return arrays, {"prop": prop, "alg": alg, **{name: tuple(values) for name, values in names.items()}}
