"""The formats of this target: dense, channels-last, and opaque ones, of which PyTorch hides the blocks."""

from __future__ import annotations

from collections.abc import Hashable

from fmtprop.layout import MemoryDesc

#: token of the format of an activation in an mkldnn tensor: operators accept any blocks
_ACTIVATION = "mkldnn"


def opaque(desc: MemoryDesc) -> MemoryDesc:
    """Return the format of a tensor's numbers in an mkldnn tensor.

    The size is that of the numbers only: PyTorch's padding is known when the tensor exists (:func:`fmtprop.inspect`).
    """
    return MemoryDesc.opaque(desc.dims, desc.dtype, desc.nelems * desc.dtype.nbytes, _ACTIVATION)


def is_opaque(desc: MemoryDesc) -> bool:
    """Whether it is the format of :func:`opaque`."""
    return desc == opaque(desc)


def packed(desc: MemoryDesc, recipe: Hashable) -> MemoryDesc:
    """Return the format of weights packed for one operator with one set of arguments."""
    return MemoryDesc.opaque(desc.dims, desc.dtype, desc.nelems * desc.dtype.nbytes, ("packed", recipe))


def packing_of(desc: MemoryDesc) -> Hashable | None:
    """Return the recipe of packed weights, None for any other format."""
    token = desc.token
    return token[1] if isinstance(token, tuple) and token[:1] == ("packed",) else None
