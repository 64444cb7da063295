"""The three primitives that compute a linear layer over rows: matmul, inner product and 1x1 convolution.

Owns their creation from descriptors that are regrouped already. Must not know any op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PrimitiveAttr, PrimitiveDesc


def make_matmul(descs: Mapping[str, NativeDesc], attr: PrimitiveAttr | None) -> PrimitiveDesc:
    """Create [M, K] x [K, N], bias [1, N] or of dst's size."""
    from fmtprop import dnnl

    problem = dnnl.Matmul(src=descs["src"], weights=descs["weights"], bias=descs.get("bias"), dst=descs["dst"])
    return dnnl.create(problem, attr)


def make_inner_product(descs: Mapping[str, NativeDesc], attr: PrimitiveAttr | None) -> PrimitiveDesc:
    """Create the inner product of [M, K] and [N, K], bias [N]."""
    from fmtprop import dnnl

    problem = dnnl.InnerProduct(src=descs["src"], weights=descs["weights"], bias=descs.get("bias"), dst=descs["dst"])
    return dnnl.create(problem, attr)


def make_pointwise(descs: Mapping[str, NativeDesc], attr: PrimitiveAttr | None) -> PrimitiveDesc:
    """Create the convolution of [1, K, M, 1] with [N, K, 1, 1], bias [N]."""
    from fmtprop import dnnl

    problem = dnnl.Convolution(
        src=descs["src"],
        weights=descs["weights"],
        bias=descs.get("bias"),
        dst=descs["dst"],
        strides=(1, 1),
        dilates=(0, 0),
        pad_l=(0, 0),
        pad_r=(0, 0),
    )
    return dnnl.create(problem, attr)
