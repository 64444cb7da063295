"""Conversion between tensors of ONNX and of PyTorch: element types and data.

A value is a torch tensor if PyTorch has the element type, else a numpy array (strings, 4-bit and 8-bit floats, …), a
list (a sequence) or None (an absent optional). This module must not know about nodes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from fmtprop.errors import ImportModelError

#: ONNX's element types in which PyTorch computes
TORCH_DTYPES: Final[dict[int, torch.dtype]] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.BOOL: torch.bool,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.UINT32: torch.uint32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.COMPLEX64: torch.complex64,
    TensorProto.COMPLEX128: torch.complex128,
    TensorProto.BFLOAT16: torch.bfloat16,
}
_ELEMENT_TYPES: Final = {dtype: number for number, dtype in TORCH_DTYPES.items()}
_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_NUMPY: Final = {
    helper.tensor_dtype_to_np_dtype(number): dtype
    for number, dtype in TORCH_DTYPES.items()
    if number != TensorProto.BFLOAT16
}

#: integers of less than a byte -> the bytes that hold one each
_IN_BYTES: Final = {
    np.dtype(getattr(ml_dtypes, name)): np.dtype(np.uint8 if name.startswith("u") else np.int8)
    for name in ("int2", "uint2", "int4", "uint4")
    if hasattr(ml_dtypes, name)
}


def in_bytes(value: Any) -> Any:
    """Return integers of less than a byte as bytes, which PyTorch has; any other value as it is."""
    if not isinstance(value, np.ndarray) or value.dtype not in _IN_BYTES:
        return value
    return torch.from_numpy(value.astype(_IN_BYTES[value.dtype]))


@cache
def type_name(number: int) -> str:
    """Return the name of an element type, such as ``"FLOAT"``.

    >>> type_name(1), type_name(99)
    ('FLOAT', '99')
    """
    known = TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(number)) if number in known else str(number)


def type_number(name: str) -> int:
    """Return the element type of a name; 0 for an unknown name.

    >>> type_number("FLOAT"), type_number("SOFA")
    (1, 0)
    """
    number: int = dict(TensorProto.DataType.items()).get(name, 0)
    return number


def element_type(value: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """Return ONNX's number for the element type of a tensor."""
    if isinstance(value, torch.Tensor):
        return _ELEMENT_TYPES[value.dtype]
    return int(helper.np_dtype_to_tensor_dtype(value.dtype))


def number_of(dtype: torch.dtype) -> int:
    """Return ONNX's number for a data type of PyTorch."""
    return _ELEMENT_TYPES[dtype]


def from_array(array: Any) -> Any:
    """Return a numpy array as a torch tensor of the same memory, or unchanged if PyTorch lacks its type.

    >>> from_array(np.float32([1, 2]))
    tensor([1., 2.])
    >>> from_array(np.array(["a"], dtype=object))
    array(['a'], dtype=object)
    """
    array = np.asarray(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype == _BFLOAT16:
        return _shared(array.view(np.int16)).view(torch.bfloat16)
    return _shared(array) if is_shared(array.dtype) else array


def is_shared(dtype: np.dtype[Any]) -> bool:
    """Return whether PyTorch's tensors share the memory of numpy's arrays of a type."""
    return dtype in _NUMPY


def _shared(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if not array.flags.writeable:  # the bytes of a file; torch warns, but constants are never written
        array = array.view()
        try:
            array.flags.writeable = True
        except ValueError:
            array = array.copy()
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    return torch.from_numpy(array)


def array_of(value: Any) -> Any:
    """Return a value as a numpy array, a sequence as a list of them: the inverse of :func:`from_array`."""
    if type(value) is torch.Tensor:
        try:
            return value.numpy()
        except (RuntimeError, TypeError):  # lazy signs, a gradient; bfloat16
            pass
    if isinstance(value, list):
        return [array_of(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value
    if value.requires_grad or value.is_conj() or value.is_neg():
        tensor = value.detach().resolve_conj().resolve_neg()
    return tensor.view(torch.int16).numpy().view(_BFLOAT16) if tensor.dtype is torch.bfloat16 else tensor.numpy()


def torch_dtype(number: int, label: str) -> torch.dtype:
    """Return PyTorch's data type for an element type."""
    if number not in TORCH_DTYPES:
        raise ImportModelError(f"{label} has element type {type_name(number)}, which PyTorch does not compute with")
    return TORCH_DTYPES[number]


def from_proto(proto: onnx.TensorProto) -> Any:
    """Return the data of a tensor in a file, which :mod:`fmtprop.onnx.model.structure_check` has checked."""
    if proto.HasField("raw_data"):
        number, dims, data = proto.data_type, tuple(proto.dims), proto.raw_data
        if len(data) == numpy_type(number).itemsize * math.prod(dims):
            return from_bytes(bytearray(data), number, dims)
    if proto.data_type == TensorProto.STRING:  # onnx would give each text as much room as the longest one
        texts = np.empty(len(proto.string_data), object)
        texts[:] = [text.decode() for text in proto.string_data]
        return texts.reshape(tuple(proto.dims))
    return from_array(onnx.numpy_helper.to_array(proto))  # numbers in other fields, or several that share a byte


def from_bytes(data: Any, number: int, dims: tuple[int, ...]) -> Any:
    """Return a tensor of one of ONNX's element types that shares its bytes with a buffer, which can be written to."""
    dtype = TORCH_DTYPES.get(number)
    if dtype is None or not len(data):
        return from_array(np.frombuffer(data, numpy_type(number)).reshape(dims))
    if dtype is torch.bool:  # PyTorch's functions rely on 0 and 1
        return torch.frombuffer(data, dtype=torch.uint8).reshape(dims) != 0
    return torch.frombuffer(data, dtype=dtype).reshape(dims)


@cache
def numpy_type(number: int) -> np.dtype[Any]:
    """Return numpy's type for an element type."""
    found: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(number))
    return found
