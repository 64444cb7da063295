"""Hostile files of more than 2 MB, from which weights are cut out before protobuf reads them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from fmtprop.onnx.model.wire import varint_of

TEXT = '<ir_version: 10, opset_import: ["" : 21]> g (float[2, 700] x) => (float[2, 800] y) { y = MatMul(x, w) }'
WEIGHTS = numpy_helper.from_array(np.ones((700, 800), np.float32), "w")


def field(number: int, data: bytes) -> bytes:
    return varint_of(number << 3 | 2) + varint_of(len(data)) + data


def large() -> Iterator[tuple[str, bytes]]:
    model = onnx.parser.parse_model(TEXT)
    rest = model.SerializeToString()
    model.graph.initializer.append(WEIGHTS)
    good, tensor = model.SerializeToString(), WEIGHTS.SerializeToString()
    yield "million_tiny_initialisers", rest + field(7, b"\x2a\x00" * 1_500_000)
    yield "million_graphs", rest + b"\x3a\x00" * 1_500_000
    yield "million_numbers", good + b"\x08\x08" * 1_200_000
    yield "length_of_60_bits", good + b"\x3a" + varint_of(1 << 60)
    yield "length_of_11_bytes", good + b"\x3a" + b"\xff" * 11 + b"\x01"
    yield "group", good + b"\x3b" * 100
    yield "zeros", bytes(3_000_000)
    yield "raw_data_beyond_the_end", rest + field(7, field(5, b"\x4a" + varint_of(1 << 40))) + b"\x0a" * 3_000_000
    yield "raw_data_as_a_number", rest + field(7, field(5, b"\x48\x05" + field(8, b"w"))) + field(99, bytes(3_000_000))
    yield "raw_data_twice", rest + field(7, field(5, tensor + field(9, bytes(100_000))))
    yield "model_as_raw_data", rest + field(7, field(5, field(9, good) + field(8, b"w")))
    yield "tensors_as_tensor", rest + field(7, field(5, field(5, tensor) * 3))
    yield (
        "dims_of_varints_without_end",
        rest + field(7, field(5, field(1, b"\xff" * 70_000) + field(9, bytes(2_200_000)))),
    )
    for name, change in {
        "negative_dims": lambda t: (t.ClearField("dims"), t.dims.extend([-700, -800])),
        "dims_overflow": lambda t: t.dims.extend([1 << 62, 4]),
        "unknown_type": lambda t: setattr(t, "data_type", 99),
        "no_type": lambda t: setattr(t, "data_type", 0),
        "wider_type": lambda t: setattr(t, "data_type", TensorProto.COMPLEX64),
        "segment": lambda t: setattr(t.segment, "begin", 0),
        "no_name": lambda t: t.ClearField("name"),
        "elsewhere_too": lambda t: (
            setattr(t, "data_location", 1),
            t.external_data.add(key="location", value="/etc/passwd"),
        ),
    }.items():
        made = onnx.ModelProto.FromString(good)
        change(made.graph.initializer[0])
        yield name, made.SerializeToString()
