"""PyTorch's own oneDNN: its mkldnn tensors and operators, through ``torch.ops``."""

from fmtprop.targets.mkldnn.dispatcher import computes_in
from fmtprop.targets.mkldnn.inputs import in_format
from fmtprop.targets.mkldnn.inspection import bytes_of, inspect
from fmtprop.targets.mkldnn.target import MkldnnTarget

__all__ = ["MkldnnTarget", "bytes_of", "computes_in", "in_format", "inspect"]
