"""The real memory formats of PyTorch's mkldnn tensors.

Owns the layout of the bytes in which PyTorch describes such a tensor: the descriptor struct of the oneDNN inside
PyTorch, which is private and changes between versions. So tensors with known formats and numbers are read first, as a
test. Must not know graphs or plans.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from fmtprop.errors import FmtpropError, InputError, LibraryError
from fmtprop.layout import DataType, MemoryDesc, unpack
from fmtprop.ops.pytorch import READING, nbytes_of_blocks, packed_for_convolution, serialized_format

#: bytes of the description: the struct, then PyTorch's number of groups
_NBYTES = 772
_MOST_AXES = 12
_NDIMS, _DIMS, _DTYPE, _PADDED, _OFFSETS, _OFFSET0, _KIND = 4, 8, 104, 112, 208, 304, 312
_STRIDES, _COUNT, _BLOCKS, _BLOCK_AXES = 320, 416, 424, 520
_BLOCKED = 2

#: dnnl_data_type_t
_DTYPES = {1: DataType.F16, 2: DataType.BF16, 3: DataType.F32, 4: DataType.S32, 5: DataType.S8, 6: DataType.U8}


def inspect(tensor: torch.Tensor) -> MemoryDesc:
    """Return the memory format of a PyTorch mkldnn tensor, which PyTorch hides.

    Parameters
    ----------
    tensor : torch.Tensor
        An mkldnn tensor, from ``to_mkldnn()`` or from an operator on such tensors. Packed weights of a grouped
        convolution have a separate axis of groups, as in oneDNN.

    Returns
    -------
    MemoryDesc
        Tag, blocks and padded dimensions of the tensor in memory.

    Raises
    ------
    InputError
        The tensor is not an mkldnn tensor, or is empty.
    LibraryError
        This version of PyTorch describes its tensors in another way, or no descriptor expresses the tensor's format.

    References
    ----------
    oneDNN developer guide, "Memory descriptors".

    Examples
    --------
    >>> import torch, fmtprop as fp
    >>> fp.inspect(torch.zeros(2, 17, 5, 7).to_mkldnn())
    MemoryDesc((2, 17, 5, 7), 'f32', tag='abcd')
    """
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"fp.inspect reads PyTorch mkldnn tensors, got {type(tensor).__name__}")
    if not tensor.is_mkldnn:
        raise InputError(
            f"fp.inspect reads mkldnn tensors, got one of layout {tensor.layout}; the format of a strided tensor is "
            "fp.MemoryDesc(t.shape, strides=t.stride()), any other becomes one by t.to_dense()"
        )
    _check_version()
    return _read(tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the storage of an mkldnn tensor as flat bytes: the same memory, which stays alive with the result."""
    view = _Raw(tensor)
    return torch.from_numpy(np.asarray(view))


class _Raw:
    """The memory of an mkldnn tensor in numpy's array interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._owner = tensor
        shape = (nbytes_of_blocks(tensor),)
        address = int(torch.ops.mkldnn.data_ptr(tensor))
        self.__array_interface__: dict[str, Any] = {
            "shape": shape, "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _read(tensor: torch.Tensor) -> MemoryDesc:
    blob = serialized_format(tensor)
    if len(blob) != _NBYTES:
        raise LibraryError(f"an mkldnn tensor is described in {len(blob)} bytes, not {_NBYTES}")
    ndim, kind, count = _int(blob, _NDIMS), _int(blob, _KIND), _int(blob, _COUNT)
    dtype = _DTYPES.get(_int(blob, _DTYPE))
    if not 0 < ndim <= _MOST_AXES or not 0 <= count <= _MOST_AXES or dtype is None or kind != _BLOCKED:
        raise LibraryError(
            f"this mkldnn tensor has a format that no strides and blocks express (rank {ndim}, format kind {kind}, "
            f"data type {_int(blob, _DTYPE)}): read it with t.to_dense()"
        )
    blocks = zip(_longs(blob, _BLOCK_AXES, count), _longs(blob, _BLOCKS, count), strict=True)
    desc = MemoryDesc(
        _longs(blob, _DIMS, ndim),
        dtype,
        strides=_longs(blob, _STRIDES, ndim),
        inner_blocks=tuple(blocks),
        padded_dims=_longs(blob, _PADDED, ndim),
        padded_offsets=_longs(blob, _OFFSETS, ndim),
        offset0=_longs(blob, _OFFSET0, 1)[0],
    )
    nbytes = nbytes_of_blocks(tensor)
    if desc.nbytes != nbytes or prod(desc.dims) != tensor.numel():
        raise LibraryError(
            f"this mkldnn tensor takes {nbytes} bytes for {tuple(tensor.shape)}, but its format {desc} takes "
            f"{desc.nbytes}: it carries more than its numbers (compensation, perhaps); read it with t.to_dense()"
        )
    return desc


def _int(blob: bytes, offset: int) -> int:
    return int(struct.unpack_from("<i", blob, offset)[0])


def _longs(blob: bytes, offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}q", blob, offset)


# ---------------------------------------------------------------- known versions


@lru_cache(maxsize=1)
def _check_version() -> None:
    """Read known tensors, once."""
    missing = [name for name in READING if not _has(name)]
    if missing:
        raise LibraryError(_other_version(f"it has no torch.ops.mkldnn.{missing[0]}"))
    try:
        misread = _misread()
    except (FmtpropError, RuntimeError) as error:
        raise LibraryError(_other_version(str(error))) from error
    if misread:
        raise LibraryError(_other_version(misread))


def _misread() -> str:
    """Return the first error in reading known tensors: plain ones of several ranks and types, and a packed one."""
    known = [((7,), "f32"), ((5, 3), "f32"), ((2, 3, 5, 7), "f32"), ((2, 3, 5, 7), "s8"), ((2, 3, 4, 5, 6), "f32")]
    for dims, dtype in known:
        torch_dtype = torch.int8 if dtype == "s8" else torch.float32
        got = _read(torch.zeros(dims, dtype=torch_dtype, device="cpu").to_mkldnn())
        if got != MemoryDesc(dims, dtype):
            return f"a plain tensor of {dims} is read as {got}"
    numbers = torch.arange(24 * 5 * 3 * 3, dtype=torch.float32, device="cpu").reshape(24, 5, 3, 3)
    packed = packed_for_convolution(numbers, [1, 1], [1, 1], [1, 1], 1, [1, 5, 8, 8])
    desc = _read(packed)
    same = np.array_equal(unpack(bytes_of(packed).view(torch.float32).numpy(), desc), numbers.numpy())
    return "" if same else f"packed weights, read as {desc}, differ from the original ones"


def _has(name: str) -> bool:
    return hasattr(torch.ops.mkldnn, name)


def _other_version(why: str) -> str:
    return (
        f"PyTorch {torch.__version__} describes its mkldnn tensors in a way that fmtprop does not know: {why}. "
        "fp.inspect was made for PyTorch 2.13; convert such tensors with t.to_dense()"
    )
