"""Capabilities of this library on this CPU."""

from __future__ import annotations

from functools import lru_cache

from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.kinds import Convolution
from fmtprop.dnnl.library import lib
from fmtprop.dnnl.primitive import create
from fmtprop.errors import DnnlError
from fmtprop.layout import DataType, MemoryDesc


@lru_cache(maxsize=32)
def _supports(dtype: DataType) -> bool:
    integer = dtype in (DataType.S8, DataType.U8)
    types = (dtype, DataType.S8 if integer else dtype, DataType.F32 if integer else dtype)
    shapes = (1, 16, 8, 8), (16, 16, 3, 3), (1, 16, 8, 8)
    src, weights, dst = (
        NativeDesc.from_desc(MemoryDesc.any(dims, kind)) for dims, kind in zip(shapes, types, strict=True)
    )
    ones, zeros = (1, 1), (0, 0)
    try:
        with create(
            Convolution(src=src, weights=weights, dst=dst, strides=ones, dilates=zeros, pad_l=ones, pad_r=ones)
        ) as pd:
            return not (pd.is_reference or _is_emulated(dtype))
    except DnnlError:
        return False


def _is_emulated(dtype: DataType) -> bool:
    """Return whether kernels round to a data type by several instructions, so that they are slower than those of f32.

    Without an instruction for bf16, a convolution of 64 channels takes more than twice the time of f32's.
    """
    return dtype is DataType.BF16 and lib().includes("avx512_core") and not lib().includes("avx512_core_bf16")


def supports(dtype: object) -> bool:
    """Return whether oneDNN has kernels for a data type on this CPU that are faster than those of f32, if it is one.

    `dtype`: such as ``"bf16"``; ``"s8"`` and ``"u8"`` mean the source, with s8 weights.

    >>> from fmtprop import dnnl
    >>> dnnl.supports("f32"), dnnl.supports("f64")
    (True, False)
    """
    return _supports(DataType.from_any(dtype))
