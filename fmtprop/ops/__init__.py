"""Every op, one file per family, collected explicitly."""

from fmtprop.ir.op import OPSET
from fmtprop.ops.building import emit
from fmtprop.ops.eltwise import ELTWISE, Eltwise
from fmtprop.ops.views import EXPAND, PERMUTE, RESHAPE, SLICE, Expand, Permute, Reshape, Slice

#: every declaration, in the order of the documentation
OPS = (
    ELTWISE,
    RESHAPE,
    PERMUTE,
    SLICE,
    EXPAND,
)

OPSET.update({declaration.name: declaration for declaration in OPS})

__all__ = [
    "OPS",
    "Eltwise",
    "Expand",
    "Permute",
    "Reshape",
    "Slice",
    "emit",
]
