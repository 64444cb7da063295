"""The caller's mkldnn tensors, and blocked formats, as a plan reads them.

Owns how a tensor comes to lie as a plan reads it where strides do not say it all: in place where its real format is the
planned one, else by a reorder.
"""

from __future__ import annotations

import torch

from fmtprop import dnnl
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc
from fmtprop.targets.mkldnn.formats import is_opaque
from fmtprop.targets.mkldnn.inspection import bytes_of, inspect
from fmtprop.targets.primitive import laid_out

__all__ = ["in_format"]


def in_format(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return a tensor's numbers as a plan reads them.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the descriptor's dimensions and data type: dense, or an mkldnn tensor.
    desc : MemoryDesc
        Plain, blocked, or opaque (that of the mkldnn target).

    Returns
    -------
    torch.Tensor
        For a plain format a dense tensor of these strides; for a blocked one flat memory; for an opaque one an mkldnn
        tensor. The caller's own memory, if it is in that format.
    """
    if is_opaque(desc):
        return tensor if tensor.is_mkldnn else tensor.to_mkldnn()
    if tensor.is_mkldnn:
        if inspect(tensor) == desc:
            return _memory(tensor, desc)
        tensor = tensor.to_dense()
    if desc.is_plain:
        return torch.empty_strided(desc.dims, desc.strides, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return laid_out(tensor.contiguous(), dnnl.NativeDesc.from_desc(desc))


def _memory(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return the memory of an mkldnn tensor, which stays alive with the result."""
    flat = bytes_of(tensor).view(torch_dtype(desc.dtype))
    return flat.as_strided(desc.dims, desc.strides) if desc.is_plain else flat
