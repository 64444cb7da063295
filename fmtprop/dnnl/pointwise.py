"""Element-wise primitives and softmax: eltwise, binary, prelu, softmax.

Every constructor takes operands as `NativeDesc` and returns a `PrimitiveDesc`.

References
----------
oneapi/dnnl/dnnl.h, ``dnnl_*_primitive_desc_create``.
"""

from __future__ import annotations

from fmtprop.dnnl.attr import PrimitiveAttr
from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.enums import algorithm, prop_kind
from fmtprop.dnnl.primitive import PrimitiveDesc, create
from fmtprop.dnnl.problem import checked_axis


def eltwise_forward(
    prop: str,
    alg: str,
    src: NativeDesc,
    dst: NativeDesc,
    alpha: float = 0.0,
    beta: float = 0.0,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward element-wise operation.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    alg : str
        Such as ``"eltwise_relu"``.
    src, dst : NativeDesc
        Same dims; src has a concrete format.
    alpha, beta : float
        Meaning depends on the algorithm.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    """
    params = {"prop": prop, "alg": alg, "alpha": alpha, "beta": beta}
    arguments = (prop_kind(prop), algorithm(alg), src, dst, alpha, beta)
    return create("eltwise_forward", "eltwise", {"src": src, "dst": dst}, params, arguments, attr)


def eltwise_backward(
    alg: str,
    diff_src: NativeDesc,
    diff_dst: NativeDesc,
    data: NativeDesc,
    alpha: float,
    beta: float,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of an element-wise operation.

    Parameters
    ----------
    alg : str
        Such as ``"eltwise_relu"``; names that end in ``_use_dst_for_bwd`` read dst instead of src.
    diff_src, diff_dst : NativeDesc
    data : NativeDesc
        The forward src (or dst).
    alpha, beta : float
        As in the forward primitive.
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
    """
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "diff_dst": diff_dst, "data": data}
    params = {"prop": "backward_data", "alg": alg, "alpha": alpha, "beta": beta}
    arguments = (algorithm(alg), *operands.values(), alpha, beta, hint_fwd_pd)
    return create("eltwise_backward", "eltwise", operands, params, arguments, attr)


def binary(
    alg: str,
    src0: NativeDesc,
    src1: NativeDesc,
    dst: NativeDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of an element-wise operation of two tensors.

    Parameters
    ----------
    alg : str
        Such as ``"binary_add"``.
    src0, src1, dst : NativeDesc
        Same number of axes; a size of 1 broadcasts.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    """
    operands: dict[str, NativeDesc | None] = {"src0": src0, "src1": src1, "dst": dst}
    arguments = (algorithm(alg), src0, src1, dst)
    return create("binary", "binary", operands, {"alg": alg}, arguments, attr)


def prelu_forward(
    prop: str,
    src: NativeDesc,
    weights: NativeDesc,
    dst: NativeDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward prelu.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    src, dst : NativeDesc
    weights : NativeDesc
        Slopes; as many axes as src, of its sizes or 1.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    """
    operands: dict[str, NativeDesc | None] = {"src": src, "weights": weights, "dst": dst}
    arguments = (prop_kind(prop), src, weights, dst)
    return create("prelu_forward", "prelu", operands, {"prop": prop}, arguments, attr)


def prelu_backward(
    src: NativeDesc,
    weights: NativeDesc,
    diff_src: NativeDesc,
    diff_weights: NativeDesc,
    diff_dst: NativeDesc,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a prelu by source and slopes.

    Parameters
    ----------
    src, weights, diff_src, diff_weights, diff_dst : NativeDesc
        As `prelu_forward`.
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
    """
    operands: dict[str, NativeDesc | None] = {
        "src": src,
        "weights": weights,
        "diff_src": diff_src,
        "diff_weights": diff_weights,
        "diff_dst": diff_dst,
    }
    arguments = (*operands.values(), hint_fwd_pd)
    return create("prelu_backward", "prelu", operands, {"prop": "backward"}, arguments, attr)


def softmax_forward(
    prop: str,
    alg: str,
    src: NativeDesc,
    dst: NativeDesc,
    axis: int,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward softmax.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    alg : str
        ``"softmax_accurate"`` or ``"softmax_log"``.
    src, dst : NativeDesc
    axis : int
        Axis to normalise over, from 0.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    ShapeError
        If src has no such axis.
    """
    params = {"prop": prop, "alg": alg, "axis": checked_axis(axis, src, "softmax")}
    arguments = (prop_kind(prop), algorithm(alg), src, dst, axis)
    return create("softmax_forward", "softmax", {"src": src, "dst": dst}, params, arguments, attr)


def softmax_backward(
    alg: str,
    diff_src: NativeDesc,
    diff_dst: NativeDesc,
    dst: NativeDesc,
    axis: int,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a softmax.

    Parameters
    ----------
    alg, axis
        As `softmax_forward`.
    diff_src, diff_dst, dst : NativeDesc
        ``dst`` is the forward result.
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
        If dst has no such axis.
    """
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "diff_dst": diff_dst, "dst": dst}
    params = {"prop": "backward_data", "alg": alg, "axis": checked_axis(axis, dst, "softmax")}
    arguments = (algorithm(alg), *operands.values(), axis, hint_fwd_pd)
    return create("softmax_backward", "softmax", operands, params, arguments, attr)
