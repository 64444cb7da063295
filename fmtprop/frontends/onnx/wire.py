"""How many messages a protobuf file has, and how deep they lie, before anybody makes them.

Two bytes of a file can stand for a message of a hundred bytes in memory, so a file is counted before protobuf's own
parser reads it. Which fields are messages is asked from the descriptors that come with ``onnx``; no field is
interpreted. A file that is cut off, or no protobuf at all, is left to the parser, whose error says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx

from fmtprop.errors import ImportModelError
from fmtprop.frontends.onnx import limits

__all__ = ["check_counts"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_counts(data: bytes | memoryview, where: str) -> None:
    """Check the number and the depth of messages in a serialised model.

    Parameters
    ----------
    data : bytes
        The file.
    where : str
        How messages name it.

    Raises
    ------
    ImportModelError
        There are more than :mod:`fmtprop.frontends.onnx.limits` allows.
    """
    seen = 0
    view = memoryview(data)
    pending: list[tuple[int, int, Any, int]] = [(0, len(view), onnx.ModelProto.DESCRIPTOR, 1)]
    while pending:
        start, end, descriptor, depth = pending.pop()
        if depth > limits.MESSAGE_DEPTH:
            raise ImportModelError(
                f"{where}: messages lie {depth} deep in each other; at most {limits.MESSAGE_DEPTH} may"
            )
        inner = {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
        for number, begin, stop in _fields(view, start, end):
            seen += 1
            if number in inner and begin >= 0:
                pending.append((begin, stop, inner[number], depth + 1))
        if seen > limits.FIELDS:
            raise ImportModelError(f"{where} has more than {limits.FIELDS} fields; is it a model at all?")


def _fields(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field of a message, with the range of its bytes, -1 where it is a number."""
    left = limits.FIELDS + 1
    while at < end and left:
        left -= 1
        key, at = _varint(view, at, end)
        kind = key & 7
        if kind == _VARINT:
            _, at = _varint(view, at, end)
            yield key >> 3, -1, -1
        elif kind == _BYTES:
            length, at = _varint(view, at, end)
            if at + length > end:
                return
            yield key >> 3, at, at + length
            at += length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
            yield key >> 3, -1, -1
        else:
            return


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, end
