"""Number and depth of the messages in a protobuf file, counted before it is parsed.

Two bytes of a file can become a message of a hundred bytes in memory, so the count comes before protobuf's own parser.
The descriptors of ``onnx`` tell which fields are messages; no field is interpreted. The parser reports a file that is
cut off or no protobuf.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model import limits

_VARINT, _BYTES = 0, 2
#: bytes of numbers of fixed size, by wire type
_FIXED = {1: 8, 5: 4}


def check_counts(data: bytes, where: str) -> None:
    """Check the number and the depth of messages in a serialised model."""
    if len(data) <= limits.SMALL_NBYTES:
        return
    left = limits.FIELDS
    pending: list[tuple[int, int, Any, int]] = [(0, len(data), onnx.ModelProto.DESCRIPTOR, 1)]
    while pending:
        start, end, descriptor, depth = pending.pop()
        if depth > limits.MESSAGE_DEPTH:
            raise ImportModelError(f"{where}: messages lie more than {limits.MESSAGE_DEPTH} deep in each other")
        inner = {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
        for number, begin, stop in _fields(data, start, end):
            left -= 1
            if not left:
                raise ImportModelError(f"{where} has more than {limits.FIELDS} fields; is it a model at all?")
            if begin < stop and number in inner:
                pending.append((begin, stop, inner[number], depth + 1))


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field of a message, and the range of its bytes, which is empty for a number."""
    while at < end:
        key = data[at]
        at += 1
        if key > 127:
            key, at = _varint(data, at - 1, end)
        kind = key & 7
        if kind == _BYTES and at < end:
            length = data[at]
            at += 1
            if length > 127:
                length, at = _varint(data, at - 1, end)
            if at + length > end:
                return
            yield key >> 3, at, at + length
            at += length
            continue
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            return
        yield key >> 3, at, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, end


def field_at(head: bytes) -> tuple[int, int, int] | None:
    """Return the number of a field, the bytes of its number and length, and those of its content; None for other bytes.

    A field that is a number, not bytes, gets the number 0: it is no message.

    `head`: the field's first bytes: 20, or all.

    >>> field_at(bytes([0x3A, 2, 97, 98])), field_at(bytes([8, 7])), field_at(bytes([7]))
    ((7, 2, 2), (0, 2, 0), None)
    """
    key, at = _varint(head, 0, len(head))
    kind, length = key & 7, 0
    if kind == _BYTES:
        length, at = _varint(head, at, len(head))
    elif kind == _VARINT:
        _, at = _varint(head, at, len(head))
    elif kind in _FIXED:
        length = _FIXED[kind]
    else:
        return None
    return (key >> 3 if kind == _BYTES else 0, at, length) if key >> 3 else None


def varint_of(number: int) -> bytes:
    """Return a length as protobuf writes it.

    >>> list(varint_of(300))
    [172, 2]
    """
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
