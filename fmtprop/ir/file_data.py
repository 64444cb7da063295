"""Constants of a graph file: inline bytes, seeded initialisers, and a safetensors file (the side file).

``"data"`` of a constant's row is one of ``{"init": {...}}``, an :class:`~fmtprop.ir.initialiser.Initialiser`;
``{"base64": "..."}``, the elements, row-major and little-endian; ``{"tensor": "name"}``, an entry of the side file.
"""

from __future__ import annotations

import base64
import binascii
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fmtprop.errors import GraphError, ShapeError
from fmtprop.ir.deferred import SMALL_NBYTES, Deferred
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.node import Node
from fmtprop.ir.tensors import materialise, row_major_bytes, tensor_type, torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.system.files import check_readable, replacing

#: constants of up to this many elements are in the document itself
INLINE_ELEMENTS = 64
#: limit of a constant: a few bytes of a file must not make the machine allocate any amount of memory
MOST_CONSTANT_NBYTES = 2**36
#: metadata that distinguishes a side file from another program's weights, and the beginning of such a file
_MARK = {"fmtprop": "graph"}
_OURS = re.compile(rb'.{8}\{"__metadata__":\{"fmtprop":"graph"\}', re.DOTALL)


class ConstantWriter:
    """Writer of a document's constants.

    `inline`: whether to write no side file.
    """

    def __init__(self, path: Path, inline: bool) -> None:
        self.path = path
        self.inline = inline
        #: tensors of the side file, by name
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def data(self, node: Node, data: Any) -> dict[str, Any]:
        """Return the JSON form of a constant's data."""
        if isinstance(data, Initialiser):
            return {"init": data.to_json()}
        tensor = materialise(data, node.results[0]).detach()
        if self.inline or tensor.numel() <= INLINE_ELEMENTS:
            return {"base64": base64.b64encode(_bytes(tensor)).decode("ascii")}
        if id(data) not in self._names:  # two constants may share one tensor
            self._names[id(data)] = node.name
            self.tensors[node.name] = tensor
        return {"tensor": self._names[id(data)]}

    def write(self) -> None:
        """Write the side file, if it has tensors."""
        if not self.tensors:
            return
        # safetensors requires dense tensors without shared memory; views of one buffer are copied.
        owners: set[int] = set()
        dense = {}
        for name, tensor in self.tensors.items():
            owned = tensor.contiguous()
            pointer = owned.untyped_storage().data_ptr()
            dense[name] = owned.clone() if pointer in owners else owned
            owners.add(pointer)
        with replacing(self.path, _OURS) as temporary:
            save_file(dense, temporary, _MARK)


class _SideFile:
    """A file of tensors; an error if it changes between reads."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        #: identity of the file when it was first opened
        self._identity: tuple[int, ...] | None = None

    def map(self) -> dict[str, torch.Tensor]:
        """Return all tensors in one mapping of the file; its pages are loaded on first access."""
        with self._open() as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)

    def read(self, key: str) -> torch.Tensor:
        """Return a tensor in a separate mapping of the file."""
        with self._open() as file:
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            check_readable(self.path)  # safetensors' message would be unclear
            with safe_open(self.path, framework="pt") as file:
                status = self.path.stat()
                identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
                if self._identity not in (None, identity):
                    raise GraphError(f"its weights {self.path} have changed since they were found; load it again")
                self._identity = identity
                yield file
        except FileNotFoundError:
            raise GraphError(f"its weights are missing: there is no {self.path}; copy both files together") from None
        except (SafetensorError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise GraphError(f"its weights {self.path} cannot be read: {reason}") from error


class Reader:
    """Reader of a document's constants.

    `weights`: the document's ``"weights"``: the side file's name, or None. `deferred`: whether large tensors are read
    on each request.
    """

    def __init__(self, folder: Path, weights: object, deferred: bool = False) -> None:
        self._tensors: dict[str, torch.Tensor | Deferred] = {}
        self._name = weights
        if weights is None:
            return
        if not _is_plain_name(weights):
            raise GraphError(
                f'"weights" is {weights!r}, must be the name of a .safetensors file in the same folder, without a path'
            )
        side = _SideFile(folder / str(weights))
        for key, tensor in side.map().items():
            if tensor.nbytes <= SMALL_NBYTES:
                self._tensors[key] = tensor.clone()
            else:
                later = Deferred(tensor_type(tensor), tensor.stride(), partial(side.read, key))
                # copied from a separate mapping: the pages of this one would stay until its last tensor is freed
                self._tensors[key] = later if deferred else later.make().clone()

    def data(self, where: str, row: Mapping[str, Any]) -> Any:
        """Return a row's data: an initialiser, or a tensor of the declared type."""
        data, type_ = row["data"], _declared(where, row)
        if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in _KINDS:
            raise GraphError(f"{where}: data must have one of the keys {', '.join(_KINDS)}, got {str(data)[:80]}")
        ((kind, content),) = data.items()
        try:
            return _KINDS[kind](self, content, type_)
        except GraphError as error:
            raise GraphError(f"{where}: data: {error}") from error

    def _init(self, content: object, type_: TensorType) -> Initialiser:
        initialiser = Initialiser.from_json(content)
        # data types that numpy lacks are made from float32
        initialiser.check_fits(np.float32 if type_.dtype is DataType.BF16 else type_.dtype.numpy_dtype)
        return initialiser

    def _base64(self, content: object, type_: TensorType) -> torch.Tensor:
        try:
            raw = base64.b64decode(content, validate=True) if isinstance(content, str) else None
        except (binascii.Error, ValueError):
            raw = None
        if raw is None:
            raise GraphError("base64 must be text in base64")
        if len(raw) != type_.nbytes:
            raise GraphError(f"base64 holds {len(raw)} bytes, {type_} needs {type_.nbytes}")
        return _tensor(raw, type_)

    def _tensor(self, content: object, type_: TensorType) -> torch.Tensor | Deferred:
        if not isinstance(content, str) or content not in self._tensors:
            raise GraphError(f"the side file {self._name!r} has no tensor {content!r}")
        tensor = self._tensors[content]
        found = tensor.type_ if isinstance(tensor, Deferred) else tensor_type(tensor)
        if found != type_:
            raise GraphError(f"tensor {content!r} of the side file is {found}, the node declares {type_}")
        return tensor


_KINDS: dict[str, Callable[[Reader, object, TensorType], Any]] = {
    "init": Reader._init,
    "base64": Reader._base64,
    "tensor": Reader._tensor,
}


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\:\0")


def _declared(where: str, row: Mapping[str, Any]) -> TensorType:
    results = row.get("results")
    try:
        if not isinstance(results, list) or len(results) != 1:
            raise TypeError("not one result")
        result = results[0]
        type_ = TensorType(result["dims"], result["dtype"])
    except (ShapeError, ValueError, TypeError, KeyError) as error:
        raise GraphError(f"{where}: a constant needs one result with dims and dtype, got {results!r}") from error
    if type_.nbytes > MOST_CONSTANT_NBYTES:
        raise GraphError(f"{where}: {type_} needs {type_.nbytes} bytes, a constant may have {MOST_CONSTANT_NBYTES}")
    return type_


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements row-major and little-endian."""
    return _little_endian(row_major_bytes(tensor).numpy().tobytes(), tensor.element_size())


def _tensor(raw: bytes, type_: TensorType) -> torch.Tensor:
    data = bytearray(_little_endian(raw, type_.dtype.nbytes))
    if not data:
        return torch.empty(type_.dims, dtype=torch_dtype(type_.dtype))
    return torch.frombuffer(data, dtype=torch_dtype(type_.dtype)).reshape(type_.dims)


def _little_endian(raw: bytes, size: int) -> bytes:
    if sys.byteorder == "little" or size == 1:
        return raw
    return b"".join(raw[i : i + size][::-1] for i in range(0, len(raw), size))
