"""Primitives that move or combine data: reorder, sum, concat, shuffle, reduction, resampling.

Every constructor takes operands as `NativeDesc` and returns a `PrimitiveDesc`.

References
----------
oneapi/dnnl/dnnl.h, ``dnnl_*_primitive_desc_create``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fmtprop.dnnl.attr import PrimitiveAttr
from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.engine import Engine
from fmtprop.dnnl.enums import algorithm, prop_kind
from fmtprop.dnnl.primitive import PrimitiveDesc, create
from fmtprop.dnnl.problem import checked_axis, checked_size
from fmtprop.dnnl.sizes import float_array
from fmtprop.errors import ShapeError


def reorder(src: NativeDesc, dst: NativeDesc, attr: PrimitiveAttr | None = None) -> PrimitiveDesc:
    """Return the descriptor of a copy from one format or data type to another.

    Parameters
    ----------
    src, dst : NativeDesc
        Same dims, concrete formats.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.

    Examples
    --------
    >>> from fmtprop import dnnl
    >>> from fmtprop.layout import MemoryDesc
    >>> plain = dnnl.NativeDesc.from_desc(MemoryDesc((1, 16, 4, 4), "f32", tag="abcd"))
    >>> nhwc = dnnl.NativeDesc.from_desc(MemoryDesc((1, 16, 4, 4), "f32", tag="acdb"))
    >>> dnnl.reorder(plain, nhwc).kind
    'reorder'
    """
    engine = Engine.cpu()
    arguments = (src, engine, dst, engine)
    return create("reorder", "reorder", {"src": src, "dst": dst}, {}, arguments, attr, engine_argument=False)


def concat(
    dst: NativeDesc | None,
    axis: int,
    srcs: Sequence[NativeDesc],
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a concatenation.

    Parameters
    ----------
    dst : NativeDesc or None
        None lets oneDNN choose the format.
    axis : int
        Axis along which the sources follow each other.
    srcs : sequence of NativeDesc
        At least one, with concrete formats.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If there is no source or no such axis.
    """
    descs = _descs(srcs, "concat")
    operands = {**_numbered(srcs), "dst": dst}
    params = {"axis": checked_axis(axis, srcs[0], "concat")}
    return create("concat", "concat", operands, params, (dst, len(srcs), axis, descs), attr)


def sum(
    dst: NativeDesc | None,
    scales: Sequence[float],
    srcs: Sequence[NativeDesc],
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a weighted sum of tensors.

    Parameters
    ----------
    dst : NativeDesc or None
        None lets oneDNN choose the format.
    scales : sequence of float
        One factor per source.
    srcs : sequence of NativeDesc
        At least one, same dims, concrete formats.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If there is no source, or not one scale for each.
    """
    descs = _descs(srcs, "sum")
    if len(scales) != len(srcs):
        raise ShapeError(f"sum: {len(srcs)} sources need {len(srcs)} scales, not {len(scales)}")
    operands = {**_numbered(srcs), "dst": dst}
    arguments = (dst, len(srcs), float_array(scales), descs)
    return create("sum", "sum", operands, {"scales": tuple(scales)}, arguments, attr)


def shuffle_forward(
    prop: str,
    src: NativeDesc,
    dst: NativeDesc,
    axis: int,
    group_size: int,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward shuffle.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    src, dst : NativeDesc
    axis : int
        Axis that is shuffled.
    group_size : int
        Channels of one group; divides the axis. (PyTorch's ``channel_shuffle`` takes the number of groups instead.)
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If src has no such axis, or ``group_size`` is out of range.
    """
    params = {"prop": prop, "axis": checked_axis(axis, src, "shuffle"), "group_size": group_size}
    size = checked_size(group_size, "shuffle group_size")
    arguments = (prop_kind(prop), src, dst, axis, size)
    return create("shuffle_forward", "shuffle", {"src": src, "dst": dst}, params, arguments, attr)


def shuffle_backward(
    diff_src: NativeDesc,
    diff_dst: NativeDesc,
    axis: int,
    group_size: int,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a shuffle.

    Parameters
    ----------
    diff_src, diff_dst : NativeDesc
    axis, group_size : int
        As `shuffle_forward`.
    hint_fwd_pd : PrimitiveDesc
        The forward_training primitive's descriptor.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If there is no such axis, or ``group_size`` is out of range.
    """
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "diff_dst": diff_dst}
    axis = checked_axis(axis, diff_src, "shuffle")
    params = {"prop": "backward_data", "axis": axis, "group_size": group_size}
    size = checked_size(group_size, "shuffle group_size")
    arguments = (diff_src, diff_dst, axis, size, hint_fwd_pd)
    return create("shuffle_backward", "shuffle", operands, params, arguments, attr)


def reduction(
    alg: str,
    src: NativeDesc,
    dst: NativeDesc,
    p: float = 0.0,
    eps: float = 0.0,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a reduction.

    Parameters
    ----------
    alg : str
        Such as ``"reduction_mean"``.
    src, dst : NativeDesc
        dst has size 1 along every axis that is reduced.
    p, eps : float
        Of the norm algorithms.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    """
    arguments = (algorithm(alg), src, dst, p, eps)
    params = {"alg": alg, "p": p, "eps": eps}
    return create("reduction", "reduction", {"src": src, "dst": dst}, params, arguments, attr)


def resampling_forward(
    prop: str,
    alg: str,
    factors: Sequence[float] | None,
    src: NativeDesc,
    dst: NativeDesc | None,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward resampling.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    alg : str
        ``"resampling_nearest"`` or ``"resampling_linear"`` (half-pixel centres).
    factors : sequence of float or None
        dst size / src size per spatial axis; None takes them from the dims.
    src : NativeDesc
        (N, C, spatial).
    dst : NativeDesc or None
        None takes its dims from the factors.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If there is not one factor per spatial axis.
    """
    params = {"prop": prop, "alg": alg, "factors": factors}
    arguments = (prop_kind(prop), algorithm(alg), _factors(factors, src), src, dst)
    return create("resampling_forward", "resampling", {"src": src, "dst": dst}, params, arguments, attr)


def resampling_backward(
    alg: str,
    factors: Sequence[float] | None,
    diff_src: NativeDesc,
    diff_dst: NativeDesc,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a resampling.

    Parameters
    ----------
    alg, factors
        As `resampling_forward`.
    diff_src, diff_dst : NativeDesc
    hint_fwd_pd : PrimitiveDesc
        The forward_training primitive's descriptor.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If there is not one factor per spatial axis.
    """
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "diff_dst": diff_dst}
    params = {"prop": "backward_data", "alg": alg, "factors": factors}
    array = _factors(factors, diff_src)
    arguments = (algorithm(alg), array, diff_src, diff_dst, hint_fwd_pd)
    return create("resampling_backward", "resampling", operands, params, arguments, attr)


def _factors(factors: Sequence[float] | None, data: NativeDesc) -> object:
    if factors is None:
        return None
    spatial = len(data.dims) - 2
    if len(factors) != spatial:
        raise ShapeError(f"resampling factors {list(factors)}: {data} needs {spatial}, one per spatial axis")
    return float_array(factors)


def _descs(srcs: Sequence[NativeDesc], what: str) -> tuple[NativeDesc, ...]:
    if not srcs:
        raise ShapeError(f"{what}: at least one source is needed")
    return tuple(srcs)


def _numbered(srcs: Sequence[NativeDesc]) -> dict[str, NativeDesc | None]:
    return {f"src{index}": src for index, src in enumerate(srcs)}
