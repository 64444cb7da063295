"""Matrix products: inner product and matmul.

Every constructor takes operands as `NativeDesc` (None where an optional one is absent) and returns a
`PrimitiveDesc`.

References
----------
oneapi/dnnl/dnnl.h, ``dnnl_*_primitive_desc_create``.
"""

from __future__ import annotations

from fmtprop.dnnl.attr import PrimitiveAttr
from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.enums import prop_kind
from fmtprop.dnnl.primitive import PrimitiveDesc, create


def inner_product_forward(
    prop: str,
    src: NativeDesc,
    weights: NativeDesc,
    bias: NativeDesc | None,
    dst: NativeDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a forward inner product (fully connected layer).

    Parameters
    ----------
    prop : str
        ``"forward_inference"`` or ``"forward_training"``.
    src, weights, dst : NativeDesc
        (N, IC, spatial…), (OC, IC, spatial…), (N, OC).
    bias : NativeDesc or None
        (OC,).
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    """
    operands: dict[str, NativeDesc | None] = {"src": src, "weights": weights, "bias": bias, "dst": dst}
    arguments = (prop_kind(prop), *operands.values())
    return create("inner_product_forward", "ip", operands, {"prop": prop}, arguments, attr)


def inner_product_backward_data(
    diff_src: NativeDesc,
    weights: NativeDesc,
    diff_dst: NativeDesc,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of an inner product by its source.

    Parameters
    ----------
    diff_src, weights, diff_dst : NativeDesc
        As `inner_product_forward`.
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
    operands: dict[str, NativeDesc | None] = {"diff_src": diff_src, "weights": weights, "diff_dst": diff_dst}
    arguments = (*operands.values(), hint_fwd_pd)
    return create("inner_product_backward_data", "ip", operands, {"prop": "backward_data"}, arguments, attr)


def inner_product_backward_weights(
    src: NativeDesc,
    diff_weights: NativeDesc,
    diff_bias: NativeDesc | None,
    diff_dst: NativeDesc,
    hint_fwd_pd: PrimitiveDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of the gradient of an inner product by its weights and bias.

    Parameters
    ----------
    src, diff_weights, diff_bias, diff_dst : NativeDesc
        As `inner_product_forward`.
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
    operands = {"src": src, "diff_weights": diff_weights, "diff_bias": diff_bias, "diff_dst": diff_dst}
    arguments = (*operands.values(), hint_fwd_pd)
    return create("inner_product_backward_weights", "ip", operands, {"prop": "backward_weights"}, arguments, attr)


def matmul(
    src: NativeDesc,
    weights: NativeDesc,
    bias: NativeDesc | None,
    dst: NativeDesc,
    attr: PrimitiveAttr | None = None,
) -> PrimitiveDesc:
    """Return the descriptor of a (batched) matrix product.

    Parameters
    ----------
    src, weights, dst : NativeDesc
        (…, M, K), (…, K, N), (…, M, N); batch axes of size 1 broadcast.
    bias : NativeDesc or None
        As many axes as dst, of its sizes or 1.
    attr : PrimitiveAttr, optional

    Returns
    -------
    PrimitiveDesc

    Raises
    ------
    DnnlError
        If oneDNN refuses.
    """
    operands: dict[str, NativeDesc | None] = {"src": src, "weights": weights, "bias": bias, "dst": dst}
    return create("matmul", "matmul", operands, {}, tuple(operands.values()), attr)
