"""The caller's mkldnn tensors, and blocked formats, at a plan's boundary.

Owns how a tensor comes to lie as a plan reads it where strides do not say it all: in place where its real format is the
planned one, else by a reorder.
"""

from __future__ import annotations

import torch

from fmtprop import dnnl
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc
from fmtprop.targets.mkldnn import bytes_of, inspect
from fmtprop.targets.mkldnn.formats import is_opaque

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
    return _blocked(tensor.contiguous(), desc)


def _memory(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return the memory of an mkldnn tensor, which stays alive with the result."""
    flat = bytes_of(tensor).view(torch_dtype(desc.dtype))
    return flat.as_strided(desc.dims, desc.strides) if desc.is_plain else flat


def _blocked(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    src = dnnl.NativeDesc.from_desc(MemoryDesc(desc.dims, desc.dtype))
    dst = dnnl.NativeDesc.from_desc(desc)
    flat = torch.empty(desc.nbytes // desc.dtype.nbytes, dtype=tensor.dtype, device="cpu")
    engine = dnnl.Engine.cpu()
    with dnnl.create(dnnl.Reorder(src=src, dst=dst)) as pd:
        room = torch.empty(max(pd.scratchpad_nbytes, 1), dtype=torch.uint8, device="cpu")
        memories: dict[int | dnnl.Arg, dnnl.Memory] = {
            dnnl.Arg.FROM: dnnl.Memory(engine, src, tensor.data_ptr(), tensor),
            dnnl.Arg.TO: dnnl.Memory(engine, dst, flat.data_ptr(), flat),
        }
        scratchpad = pd.query_md("scratchpad")
        if pd.scratchpad_nbytes and scratchpad is not None:
            memories[dnnl.Arg.SCRATCHPAD] = dnnl.Memory(engine, scratchpad, room.data_ptr(), room)
        dnnl.Primitive(pd).execute(dnnl.Stream(engine), memories)
    return flat
