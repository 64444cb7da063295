"""Constants as torch tensors: conversion of data types, and tensors from initialisers.

The only module of :mod:`fmtprop.ir` besides the graph file that imports torch; import it where tensors are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from fmtprop.errors import GraphError
from fmtprop.ir.deferred import SMALL_NBYTES, Deferred
from fmtprop.ir.graph import Graph
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc

#: an entry of :attr:`Graph.constants <fmtprop.ir.graph.Graph.constants>`
Constant = torch.Tensor | Initialiser | Deferred

_TORCH: dict[DataType, torch.dtype] = {
    DataType.F32: torch.float32,
    DataType.BF16: torch.bfloat16,
    DataType.F16: torch.float16,
    DataType.F64: torch.float64,
    DataType.S32: torch.int32,
    DataType.S8: torch.int8,
    DataType.U8: torch.uint8,
    DataType.S64: torch.int64,
    DataType.S16: torch.int16,
    DataType.U64: torch.uint64,
    DataType.U32: torch.uint32,
    DataType.U16: torch.uint16,
    DataType.BOOLEAN: torch.bool,
}
_FROM_TORCH = {theirs: ours for ours, theirs in _TORCH.items()}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings, depth first; other objects are ignored."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def row_major_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's numbers in row-major order, flat, in its own memory where they lie so.

    >>> row_major_bytes(torch.tensor(1.0).expand(1)).tolist()  # contiguous for PyTorch, with a stride of 0
    [0, 0, 128, 63]
    """
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return nested tuples, lists and dictionaries with a function's result in place of each tensor.

    >>> map_tensors({"x": [torch.ones(2), 3]}, torch.numel)
    {'x': [2, 3]}
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def torch_dtype(dtype: DataType) -> torch.dtype:
    """Return the torch dtype of a data type.

    >>> torch_dtype(DataType.BF16)
    torch.bfloat16
    """
    return _TORCH[dtype]


def data_type(dtype: torch.dtype) -> DataType:
    """Return the data type of a torch dtype."""
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise GraphError(f"{dtype} has no data type here; known: {', '.join(map(str, _FROM_TORCH))}") from None


def tensor_type(tensor: torch.Tensor) -> TensorType:
    """Return the logical type of a torch tensor; strides do not matter.

    >>> tensor_type(torch.zeros(2, 3, dtype=torch.bfloat16))
    bf16[2,3]
    """
    if tensor.is_sparse or tensor.layout is torch.sparse_csr:
        raise GraphError(
            f"a graph holds dense tensors, and this one is {tensor.layout}, as the gradient of an embedding with "
            "sparse=True: use sparse=False"
        )
    return TensorType(tuple(tensor.shape), data_type(tensor.dtype))


def materialise(data: Any, type_: TensorType) -> torch.Tensor:
    """Return a constant's data as a torch tensor.

    >>> materialise(Initialiser.constant(2.0), TensorType((2,), "bf16"))
    tensor([2., 2.], dtype=torch.bfloat16)
    """
    if isinstance(data, Initialiser):
        return _draw(data, type_)
    if isinstance(data, Deferred):
        data = data.make()
    if not isinstance(data, torch.Tensor):
        raise GraphError(f"constant data must be a torch.Tensor or an Initialiser, got {type(data).__name__}")
    if tensor_type(data) != type_:
        raise GraphError(f"constant data is {tensor_type(data)} but the node declares {type_}")
    return data


def is_fresh(data: Constant) -> bool:
    """Return whether the tensor from `materialise` owns its memory: it may be kept or changed without a copy."""
    return isinstance(data, Initialiser) or (isinstance(data, Deferred) and data.fresh)


def defer(graph: Graph, *, lent: bool = False) -> Graph:
    """Return the same graph with deferred large constants: passes do not make them before they are read.

    `lent`: whether a plan may read the tensors where they are.
    """
    late = graph.copy()
    for name, data in graph.constants.items():
        # entries that break a rule stay unchanged: the verifier reports them
        type_ = graph.node(name).results[0] if name in graph and graph.node(name).op == "constant" else None
        if type_ is None or type_.nbytes <= SMALL_NBYTES:
            continue
        if isinstance(data, Initialiser):
            strides = MemoryDesc(type_.dims, type_.dtype).strides
            late.constants[name] = Deferred(type_, strides, partial(_draw, data, type_), True, data.largest)
        elif isinstance(data, torch.Tensor) and data.layout is torch.strided:
            late.constants[name] = Deferred(tensor_type(data), data.stride(), data.detach, lent=lent)
    return late


def _draw(data: Initialiser, type_: TensorType) -> torch.Tensor:
    dtype = type_.dtype
    exact = data.kind == "constant" and dtype is not DataType.BF16
    array = data.materialise(type_.dims, dtype.numpy_dtype if exact else np.float32)
    return torch.from_numpy(array).to(torch_dtype(dtype))
