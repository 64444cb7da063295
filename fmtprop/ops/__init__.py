"""Every op, one file per family, collected explicitly."""

from fmtprop.ir.op import OPSET
from fmtprop.ops.building import emit
from fmtprop.ops.eltwise import ELTWISE, Eltwise

#: every declaration, in the order of the documentation
OPS = (ELTWISE,)

OPSET.update({declaration.name: declaration for declaration in OPS})

__all__ = ["OPS", "Eltwise", "emit"]
