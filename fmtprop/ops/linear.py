"""The three primitives that compute a linear layer over rows: matmul, inner product and 1x1 convolution.

Owns their creation from descriptors that are regrouped already. Must not know any op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fmtprop.ops.building import create

if TYPE_CHECKING:
    from fmtprop.ops.regrouping import Make


def _make(problem: str, **parameters: Any) -> Make:
    return lambda descs, attr: create(problem, None, descs, attr, **parameters)


#: [M, K] x [K, N], bias [1, N] or of dst's size
make_matmul = _make("Matmul")

#: the inner product of [M, K] and [N, K], bias [N]
make_inner_product = _make("InnerProduct")

#: the convolution of [1, K, M, 1] with [N, K, 1, 1], bias [N]
make_pointwise = _make("Convolution", strides=(1, 1), dilates=(0, 0), pad_l=(0, 0), pad_r=(0, 0))
