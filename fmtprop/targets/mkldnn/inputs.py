"""Conversion of the caller's mkldnn tensors, and to blocked formats, for a plan.

Owns the conversion to formats that strides do not describe: in place if the real format is the planned one, otherwise
by a reorder.
"""

from __future__ import annotations

import torch

from fmtprop import dnnl
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc
from fmtprop.targets.memory import copied
from fmtprop.targets.mkldnn.formats import is_opaque
from fmtprop.targets.mkldnn.inspection import bytes_of, inspect
from fmtprop.targets.primitive import laid_out


def in_format(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return a tensor's numbers in a plan's format."""
    if is_opaque(desc):
        return tensor if tensor.is_mkldnn else tensor.to_mkldnn()
    if tensor.is_mkldnn:
        if inspect(tensor) == desc:
            return _memory(tensor, desc)
        tensor = tensor.to_dense()
    if desc.is_plain:
        return copied(tensor, desc)
    return laid_out(tensor.contiguous(), dnnl.NativeDesc.from_desc(desc))


def _memory(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return the memory of an mkldnn tensor, which stays alive with the result."""
    flat = bytes_of(tensor).view(torch_dtype(desc.dtype))
    return flat.as_strided(desc.dims, desc.strides) if desc.is_plain else flat
