"""Tensors that are read from files one by one: those of external data, and large ones of the model's own file.

Protobuf would hold the bytes of all weights twice. So the weights of a large file are cut out of its messages before
these are parsed, and each is read from its place.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model import limits
from fmtprop.onnx.model.elements import from_bytes, from_proto, numpy_type
from fmtprop.onnx.model.structure_check import nbytes_of
from fmtprop.onnx.model.wire import field_at, varint_of
from fmtprop.system.machine import memory_nbytes

#: smaller tensors stay in their messages
LARGE_NBYTES = (1 << 16) + 1


class OwnData:
    """A large model file, and the places of its initialisers' raw data.

    `rest`: the file's messages without the raw data of large initialisers, of at least `least_nbytes`. `places`: index
    of such an initialiser to the offset of its data and their number of bytes.
    """

    def __init__(self, file: BinaryIO, name: str, least_nbytes: int = LARGE_NBYTES) -> None:
        self.file = file
        self._least_nbytes = least_nbytes
        self.name = name
        self.places: dict[int, tuple[int, int]] = {}
        self._left = limits.FIELDS
        self._initialisers = 0
        #: a part of the file, and its place: heads of fields lie close together
        self._window, self._window_at = b"", 0
        size = os.fstat(file.fileno()).st_size
        try:
            self.rest = b"".join(self._pieces(0, size, 0))
        except _DamagedError:  # protobuf says where
            self.places = {}
            file.seek(0)
            self.rest = file.read(size)

    def mark(self, model: onnx.ModelProto) -> None:
        """Mark the initialisers whose data are here, after their bytes are compared with their declarations."""
        for index, (_, length) in self.places.items():
            tensor = model.graph.initializer[index]
            where = f"{self.name}: initialiser {tensor.name[:200]}"
            wanted = nbytes_of(tensor, where)
            if wanted != length:
                raise ImportModelError(f"{where} declares {list(tensor.dims)[:8]}, {wanted} bytes, but has {length}")
            if tensor.data_location == TensorProto.EXTERNAL:
                raise ImportModelError(f"{where} has its numbers twice, in the model and in another file")
            tensor.data_location = TensorProto.EXTERNAL

    def read(self, index: int, tensor: onnx.TensorProto) -> Any:
        """Return the data of a marked initialiser."""
        offset, length = self.places[index]
        data: Any = np.empty(length, np.uint8)  # a bytearray would be filled with zeros first
        self.file.seek(offset)
        if self.file.readinto(data) != length:  # type: ignore[attr-defined]
            raise ImportModelError(f"{self.name} was cut off while it was read")
        return _value(tensor, data)

    def _pieces(self, at: int, end: int, depth: int) -> Iterator[bytes]:
        """Yield the bytes of a message without large raw data: of the model, its graph, or an initialiser."""
        descend, start = {0: _GRAPH, 1: _INITIALISER}.get(depth), at
        while at < end:
            self._left -= 1
            if not self._left:
                raise ImportModelError(f"{self.name} has more than {limits.FIELDS} fields; is it a model at all?")
            number, head, length = self._field(at, end)
            stop = at + head + length
            if stop > end:
                raise _DamagedError
            large = length >= self._least_nbytes
            if number == descend and large:
                inner = list(self._pieces(at + head, stop, depth + 1))
                yield from (self._between(start, at), bytes([8 * number + 2]), varint_of(sum(map(len, inner))), *inner)
                start = stop
            elif depth == _TENSOR_DEPTH and number == _RAW_DATA and large:
                if self._initialisers in self.places:
                    raise _DamagedError  # protobuf takes the last
                self.places[self._initialisers] = (at + head, length)
                yield self._between(start, at)
                start = stop
            self._initialisers += depth == 1 and number == _INITIALISER
            at = stop
        yield self._between(start, end)

    def _field(self, at: int, end: int) -> tuple[int, int, int]:
        """Return the number of a field, the bytes of its number and length, and those of its content."""
        begin = at - self._window_at
        if not 0 <= begin <= len(self._window) - _LONGEST_HEAD:
            self.file.seek(at)
            self._window, self._window_at, begin = self.file.read(_WINDOW_NBYTES), at, 0
        window = self._window
        if begin + 3 <= min(len(window), begin + end - at):  # most have a number and a length of one or two bytes
            key, low, high = window[begin : begin + 3]
            if key & 0x87 == _SHORT_BYTES and low < 128:
                return key >> 3, 2, low
            if key & 0x87 == _SHORT_BYTES and high < 128:
                return key >> 3, 3, low & 127 | high << 7
        found = field_at(window[begin : begin + min(_LONGEST_HEAD, end - at)])
        if found is None:
            raise _DamagedError
        return found

    def _between(self, start: int, end: int) -> bytes:
        self.file.seek(start)
        return self.file.read(end - start)


class _DamagedError(Exception):
    """The bytes are no messages."""


#: field of a model with its graph, of a graph with an initialiser, of a tensor with its bytes
_GRAPH, _INITIALISER, _RAW_DATA = 7, 5, 9
_TENSOR_DEPTH = 2
#: the first byte of a field of bytes, but for its number
_SHORT_BYTES = 2
#: most bytes of a field's number and length
_LONGEST_HEAD = 20
_WINDOW_NBYTES = 1 << 12


class ExternalData:
    """The files of a model's external data; each range is read once.

    `folder`: the model's folder; None if the model is no file.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self.folder = folder
        self.name = name
        self.ranges: dict[tuple[str, int, int], Any] = {}
        self.nbytes = 0
        #: sizes of the files that were read, by device and inode
        self.sizes: dict[tuple[int, int], int] = {}

    def read(self, tensor: onnx.TensorProto, where: str) -> Any:
        """Return the data of a tensor."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        nbytes = nbytes_of(tensor, where)
        offset = _size(entries.get("offset", "0"), f"{where}: offset")
        length = _size(entries.get("length", str(nbytes)), f"{where}: length")
        if length != nbytes:
            raise ImportModelError(f"{where} needs {nbytes} bytes, but its external data has {length}")
        key = (location, offset, length)
        if key not in self.ranges:
            self.ranges[key] = self._bytes(*key, where)
        return _value(tensor, self.ranges[key])

    def _bytes(self, location: str, offset: int, length: int, where: str) -> Any:
        folder, parts = self._parts(location, where)
        try:
            with os.fdopen(_descriptor(folder, parts), "rb") as opened:
                status = os.fstat(opened.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ImportModelError(f"{where}: {location!r} is not a regular file")
                if status.st_nlink > 1:
                    raise ImportModelError(
                        f"{where}: {location!r} has {status.st_nlink} names (hard links), so it may be a file from "
                        "outside of the model's folder; put a copy of it there"
                    )
                if offset + length > status.st_size:
                    raise ImportModelError(
                        f"{where}: bytes {offset} to {offset + length} of {location!r}, which has {status.st_size}; "
                        "copy it again"
                    )
                self._check_total(status, length, f"{where}: {location!r}")
                opened.seek(offset)
                data: Any = np.empty(length, np.uint8)
                read = opened.readinto(data)
        except OSError as error:
            link = error.errno in (errno.ELOOP, errno.ENOTDIR)
            reason = "it leads over a link, which could lead anywhere, or over a file" if link else error.strerror
            raise ImportModelError(
                f"{where}: {location!r} cannot be read: {reason}; it belongs into the model's folder"
            ) from error
        if read != length:
            raise ImportModelError(f"{where}: {location!r} was cut off while it was read")
        return data

    def _check_total(self, status: os.stat_result, length: int, where: str) -> None:
        """Refuse data that take much memory and little disk: of holes, or the same bytes again and again."""
        self.nbytes += length
        self.sizes[status.st_dev, status.st_ino] = status.st_size
        if self.nbytes > memory_nbytes():
            raise ImportModelError(f"{where}: the external data of {self.name} is larger than this machine's memory")
        if self.nbytes > _MOST_REPEATED_NBYTES + 2 * sum(self.sizes.values()):
            raise ImportModelError(
                f"{where}: the initialisers of {self.name} take {self.nbytes} bytes of files with "
                f"{sum(self.sizes.values())}: they overlap too much"
            )
        on_disk = 512 * status.st_blocks
        if length > _LARGE_HOLE_NBYTES and length > _MOST_COMPRESSED * on_disk:
            raise ImportModelError(f"{where} has {status.st_size} bytes, of which only {on_disk} are on the disk")

    def _parts(self, location: str, where: str) -> tuple[Path, tuple[str, ...]]:
        """Return the model's folder, and the path of a file within it."""
        if self.folder is None:
            raise ImportModelError(f"{where} is in the file {location!r} in the model's folder; give the model's path")
        path = PurePosixPath(location)
        plain = path.parts and "\0" not in location and "\\" not in location and not path.is_absolute()
        if not plain or ".." in path.parts or len(location) > limits.NAME_CHARACTERS:
            raise ImportModelError(
                f"{where} lies in {location!r}; external data must be in the model's folder, under a relative path"
            )
        return self.folder, path.parts


#: bytes of external data that may be read more than twice
_MOST_REPEATED_NBYTES = 1 << 26
#: bytes of a tensor that may be a hole of its file, and how many times smaller a file system may store a larger one
_LARGE_HOLE_NBYTES, _MOST_COMPRESSED = 1 << 28, 64


def _descriptor(folder: Path, parts: tuple[str, ...]) -> int:
    """Open a file within a folder; no part of its path may be a link, also if one is made meanwhile."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, flags | os.O_DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        return os.open(parts[-1], flags | os.O_NONBLOCK, dir_fd=directory)
    finally:
        os.close(directory)


def _size(text: str, where: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ImportModelError(f"{where} is {text[:40]!r}; it must be a number of bytes")
    return int(text)


def _value(tensor: onnx.TensorProto, data: np.ndarray[Any, Any]) -> Any:
    """Return a tensor with these data, which it shares if possible."""
    number, dims = tensor.data_type, tuple(tensor.dims)
    if numpy_type(number).itemsize * math.prod(dims) == len(data):
        return from_bytes(data, number, dims)
    inside = TensorProto(dims=dims, data_type=tensor.data_type, raw_data=data.tobytes())
    return from_proto(inside)  # several numbers share a byte
