"""Normalization primitives: batch, layer and group.

Every constructor takes operands as `NativeDesc` and returns a `PrimitiveDesc`; ``flags`` is `NormFlags`.

References
----------
oneapi/dnnl/dnnl.h, ``dnnl_*_normalization_*_primitive_desc_create``.
"""

from __future__ import annotations

from fmtprop.dnnl.attr import PrimitiveAttr
from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.enums import NormFlags, prop_kind
from fmtprop.dnnl.primitive import PrimitiveDesc, create
from fmtprop.dnnl.problem import checked_size


def batch_normalization_forward(
    prop: str,
    src: NativeDesc,
    dst: NativeDesc,
    epsilon: float,
    flags: int | NormFlags,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward batch normalization.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    src, dst : NativeDesc
        (N, C, spatial).
    epsilon : float
    flags : NormFlags
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    """
    params = {"prop": prop, "epsilon": epsilon, "flags": NormFlags(flags)}
    arguments = (prop_kind(prop), src, dst, epsilon, int(flags))
    return create("batch_normalization_forward", "bnorm", {"src": src, "dst": dst}, params, arguments, attr)


def batch_normalization_backward(
    prop: str,
    diff_src: NativeDesc,
    diff_dst: NativeDesc,
    src: NativeDesc,
    epsilon: float,
    flags: int | NormFlags,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a batch normalization.

    Parameters
    ----------
    prop : str
        ``"backward"`` (with the gradients of scale and shift) or ``"backward_data"``.
    diff_src, diff_dst, src : NativeDesc
    epsilon : float
    flags : NormFlags
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
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "diff_dst": diff_dst, "src": src}
    params = {"prop": prop, "epsilon": epsilon, "flags": NormFlags(flags)}
    descs = (diff_src, diff_dst, src)
    arguments = (prop_kind(prop), *descs, epsilon, int(flags), hint_fwd_pd)
    return create("batch_normalization_backward", "bnorm", operands, params, arguments, attr)


def layer_normalization_forward(
    prop: str,
    src: NativeDesc,
    dst: NativeDesc,
    stat: NativeDesc | None,
    epsilon: float,
    flags: int | NormFlags,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward layer normalization over the last axis.

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    src, dst : NativeDesc
    stat : NativeDesc or None
        Mean and variance: src without its last axis. None lets oneDNN choose.
    epsilon : float
    flags : NormFlags
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    """
    operands: dict[str, NativeDesc | None] = {"src": src, "dst": dst, "stat": stat}
    params = {"prop": prop, "epsilon": epsilon, "flags": NormFlags(flags)}
    arguments = (prop_kind(prop), *operands.values(), epsilon, int(flags))
    return create("layer_normalization_forward", "lnorm", operands, params, arguments, attr)


def layer_normalization_backward(
    prop: str,
    diff_src: NativeDesc,
    diff_dst: NativeDesc,
    src: NativeDesc,
    stat: NativeDesc | None,
    epsilon: float,
    flags: int | NormFlags,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a layer normalization.

    Parameters
    ----------
    prop : str
        ``"backward"`` (with the gradients of scale and shift) or ``"backward_data"``.
    diff_src, diff_dst, src : NativeDesc
    stat : NativeDesc or None
        Mean and variance, as in the forward primitive.
    epsilon : float
    flags : NormFlags
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
    operands = {"diff_src": diff_src, "diff_dst": diff_dst, "src": src, "stat": stat}
    params = {"prop": prop, "epsilon": epsilon, "flags": NormFlags(flags)}
    arguments = (prop_kind(prop), *operands.values(), epsilon, int(flags), hint_fwd_pd)
    return create("layer_normalization_backward", "lnorm", operands, params, arguments, attr)


def group_normalization_forward(
    prop: str,
    src: NativeDesc,
    dst: NativeDesc,
    groups: int,
    epsilon: float,
    flags: int | NormFlags,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward group normalization (oneDNN v3.3 and later).

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    src, dst : NativeDesc
        (N, C, spatial).
    groups : int
        Divides C.
    epsilon : float
    flags : NormFlags
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    LibraryError
        If the loaded oneDNN has no group normalization.
    DnnlError
        If oneDNN refuses.
    """
    params = {"prop": prop, "groups": groups, "epsilon": epsilon, "flags": NormFlags(flags)}
    count = checked_size(groups, "group normalization groups")
    arguments = (prop_kind(prop), src, dst, count, epsilon, int(flags))
    return create("group_normalization_forward", "gnorm", {"src": src, "dst": dst}, params, arguments, attr)


def group_normalization_backward(
    prop: str,
    diff_src: NativeDesc,
    diff_dst: NativeDesc,
    src: NativeDesc,
    groups: int,
    epsilon: float,
    flags: int | NormFlags,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of a group normalization (oneDNN v3.3 and later).

    Parameters
    ----------
    prop : str
        ``"backward"`` (with the gradients of scale and shift) or ``"backward_data"``.
    diff_src, diff_dst, src : NativeDesc
    groups : int
    epsilon : float
    flags : NormFlags
    hint_fwd_pd : PrimitiveDesc
        The forward_training primitive's descriptor.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    LibraryError
        If the loaded oneDNN has no group normalization.
    DnnlError
        If oneDNN refuses.
    """
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "diff_dst": diff_dst, "src": src}
    params = {"prop": prop, "groups": groups, "epsilon": epsilon, "flags": NormFlags(flags)}
    count = checked_size(groups, "group normalization groups")
    descs = (diff_src, diff_dst, src)
    arguments = (prop_kind(prop), *descs, count, epsilon, int(flags), hint_fwd_pd)
    return create("group_normalization_backward", "gnorm", operands, params, arguments, attr)
