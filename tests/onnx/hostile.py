"""Small files that ask for what no model may: each must end in one ImportModelError, soon, and in little memory.

``make(folder)`` writes them all; the name says what is wrong, its first word the class.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.onnx.hostile_large import large

RELU = '<ir_version: 8, opset_import: ["" : 17]> g (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }'


def model(text: str = RELU) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(onnx.parser.parse_model(text))
    return made


def body(nodes: str, inputs: str = "float[2, 3] x", outputs: str = "float[a, b] y") -> onnx.ModelProto:
    return model(f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {nodes} }}')


def with_tensor(**fields: Any) -> onnx.ModelProto:
    """A model that adds an initialiser; its fields are the caller's."""
    made = body("y = Add(x, w)")
    tensor = made.graph.initializer.add(name="w", data_type=TensorProto.FLOAT)
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(tensor, name).extend(value)
        else:
            setattr(tensor, name, value)
    return made


def external(**entries: str) -> onnx.ModelProto:
    made = with_tensor(dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        made.graph.initializer[0].external_data.add(key=key, value=value)
    return made


def varint(number: int) -> bytes:
    found = b""
    while True:
        number, low = number >> 7, number & 127
        found += bytes([low | (128 if number else 0)])
        if not number:
            return found


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


# ---------------------------------------------------------------- classes


def malformed() -> Iterator[tuple[str, bytes]]:
    good = model().SerializeToString()
    yield "empty", b""
    yield "text", b"this is not a model\n" * 10
    yield "json", b'{"graph": {"node": []}}'
    yield "zeros", bytes(1000)
    yield "ones", b"\xff" * 1000
    yield "zip", b"PK\x03\x04" + bytes(100)
    yield "pickle", b"\x80\x04\x95" + bytes(50)
    yield "endless_varint", b"\x08" + b"\x80" * 100
    yield "group", b"\x3b" * 200
    yield "length_beyond_the_end", b"\x3a" + varint(1 << 40)
    yield "length_of_64_bits", b"\x3a" + b"\xff" * 9 + b"\x01"
    yield "wrong_wire_types", bytes([0x3D, 1, 2, 3, 4]) * 20
    yield "field_zero", b"\x02\x01a" + good
    named = model('<ir_version: 8, opset_import: ["" : 17]> nameless (float[2] x) => (float[2] y) { y = Relu(x, x) }')
    yield "a_name_that_is_no_text", named.SerializeToString().replace(b"nameless", b"name\xcdess")
    draw = random.Random(0)
    for number in range(8):
        data = bytearray(good)
        for _ in range(4):
            data[draw.randrange(4, len(data))] = 0xFF
        yield f"flipped_{number}", bytes(data)


def truncated() -> Iterator[tuple[str, bytes]]:
    good = with_tensor(dims=[2, 3], raw_data=bytes(24)).SerializeToString()
    for part in (1, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99):
        yield f"at_{part}_percent", good[: max(len(good) * part // 100, 1)]


def recursive() -> Iterator[tuple[str, bytes]]:
    def function(name: str, *calls: str) -> onnx.FunctionProto:
        nodes, last = [], "a"
        for number, call in enumerate(calls):
            nodes.append(helper.make_node(call, [last], [f"v{number}"], domain="" if call == "Relu" else "mine"))
            last = f"v{number}"
        nodes.append(helper.make_node("Identity", [last], ["b"]))
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
        return helper.make_function("mine", name, ["a"], ["b"], nodes, opsets)

    def calling(first: str, *functions: onnx.FunctionProto) -> bytes:
        made = model(
            '<ir_version: 8, opset_import: ["" : 17, "mine" : 1]> '
            f"g (float[2, 3] x) => (float[2, 3] y) {{ y = mine.{first}(x) }}"
        )
        made.functions.extend(functions)
        return made.SerializeToString()

    def with_default(made: onnx.FunctionProto, called: str, times: int = 1) -> onnx.FunctionProto:
        """A function with attributes that calls leave out: graphs, each with a call."""
        for number in range(times):
            graph = made.attribute_proto.add(name=f"g{number}", type=onnx.AttributeProto.GRAPH).g
            graph.node.append(helper.make_node(called, ["a"], ["r"], domain="mine"))
            graph.output.add(name="r").type.tensor_type.elem_type = TensorProto.FLOAT
        return made

    yield "function_of_itself", calling("f", function("f", "f"))
    yield "functions_of_each_other", calling("f", function("f", "g"), function("g", "f"))
    crowded = onnx.ModelProto.FromString(calling("f", function("f", "Relu")))
    crowded.graph.node[0].input.extend(["x"] * 5)
    yield "more_operands_than_the_function_has", crowded.SerializeToString()
    yield "ring_of_functions", calling("f0", *(function(f"f{i}", f"f{(i + 1) % 9}") for i in range(9)))
    yield (
        "functions_that_double",
        calling("f0", *(function(f"f{i}", f"f{i + 1}", f"f{i + 1}") for i in range(30)), function("f30", "Relu")),
    )
    yield (
        "functions_times_hundred",
        calling("f0", *(function(f"f{i}", *[f"f{i + 1}"] * 100) for i in range(6)), function("f6", "Relu")),
    )
    yield (
        "deep_functions",
        calling("f0", *(function(f"f{i}", f"f{i + 1}") for i in range(99)), function("f99", "Relu")),
    )
    yield "default_that_calls_its_function", calling("f", with_default(function("f", "Relu"), "f"))
    yield (
        "defaults_that_double",
        calling("f0", *(with_default(function(f"f{i}"), f"f{i + 1}", 4) for i in range(25)), function("f25", "Relu")),
    )
    for depth in (20, 40, 90):
        inner = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "b", [], [])
        inner.output.add(name="z").type.tensor_type.elem_type = TensorProto.FLOAT
        for _ in range(min(depth, 24)):
            node = helper.make_node("If", ["c"], ["z"])
            node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g.CopyFrom(inner)
            inner = helper.make_graph([node], "b", [], [inner.output[0]])
        data = inner.SerializeToString()
        for _ in range(max(depth - 24, 0)):  # protobuf's own parser makes no deeper ones
            data = field(1, field(5, field(6, data)) + field(4, b"If"))
        yield f"graphs_{depth}_deep", field(7, data) + model().SerializeToString()
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
    for _ in range(20):
        sequence = helper.make_sequence_type_proto(sequence)
    deep = model()
    deep.graph.input[0].type.CopyFrom(sequence)
    yield "sequences_of_sequences", deep.SerializeToString()


def self_referential() -> Iterator[tuple[str, bytes]]:
    for name, nodes in {
        "node_of_itself": "y = Add(x, y)",
        "ring_of_nodes": "a = Add(x, c) b = Relu(a) c = Relu(b) y = Relu(c)",
        "order": "y = Relu(a) a = Relu(x)",
        "same_name_twice": "y = Relu(x) y = Neg(x)",
        "output_of_an_input": "x = Relu(x) y = Relu(x)",
    }.items():
        yield name, body(nodes).SerializeToString()
    branch = """
        t = Constant<value_int = 1>() c = Cast<to = 9>(t)
        y = If(c) <
            then_branch = a () => (float[n] p) { p = Relu(y) }, else_branch = b () => (float[n] q) { q = Relu(x) }
        >
    """
    yield "branch_of_its_own_result", body(branch).SerializeToString()


def oversized() -> Iterator[tuple[str, bytes]]:
    for name, nodes in {
        "constant_of_shape": "s = Constant<value_ints = [1099511627776]>() y = ConstantOfShape(s)",
        "constant_of_many": "s = Constant<value_ints = [100000, 100000]>() y = ConstantOfShape(s)",
        "range": "a = Constant<value_int = 0>() b = Constant<value_int = 100000000000>() c = Constant<value_int = 1>() "
        "r = Range(a, b, c) y = Cast<to = 1>(r)",
        "tile": "o = Constant<value_floats = [1.0]>() r = Constant<value_ints = [4000000000]>() y = Tile(o, r)",
        "expand": "o = Constant<value_floats = [1.0]>() r = Constant<value_ints = [4000000000]>() e = Expand(o, r) "
        "y = Neg(e)",
        "pad": "o = Constant<value_floats = [1.0]>() r = Constant<value_ints = [0, 4000000000]>() y = Pad(o, r)",
        "pad_by_edges": 'r = Constant<value_ints = [0, 0, 0, 8000000000]>() y = Pad<mode = "edge">(x, r)',
        "outputs_of_split": "y = Split<num_outputs = 268435456>(x)",
        "one_hot": "i = Constant<value_ints = [1, 2]>() d = Constant<value_int = 4000000000>() "
        "v = Constant<value_floats = [0.0, 1.0]>() y = OneHot(i, d, v)",
        "eye": "s = Constant<value_ints = [90000, 90000]>() e = Expand(x, s) y = EyeLike(e)",
        "window": "n = Constant<value_int = 4000000000>() y = HannWindow(n)",
        "doubling": "a0 = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() "
        + " ".join(f"a{i + 1} = Concat<axis = 0>(a{i}, a{i})" for i in range(40))
        + " y = Neg(a40)",
        "outer_products": "c = Constant<value_ints = [20000, 1]>() d = Constant<value_ints = [1, 20000]>() "
        "p = ConstantOfShape(c) q = ConstantOfShape(d) y = Add(p, q)",
        "sums_of_large_constants": "s = Constant<value_ints = [16000, 16000]>() w = ConstantOfShape(s) "
        + " ".join(f"r{i} = ReduceSum<keepdims = 0>(w)" for i in range(4000))
        + " y = Add(x, r3999)",
        "constants_of_one_number": "s = Constant<value_ints = [16000, 16000]>() a = ConstantOfShape(s) "
        "b = ConstantOfShape(s) c = Add(a, b) y = Neg(c)",
        "product_of_constants": "s = Constant<value_ints = [11000, 11000]>() a = ConstantOfShape(s) y = MatMul(a, a)",
        "convolution_of_constants": "s = Constant<value_ints = [1, 64, 1000, 1000]>() a = ConstantOfShape(s) "
        "t = Constant<value_ints = [64, 64, 31, 31]>() w = ConstantOfShape(t) y = Conv(a, w)",
        "endless_loop": "m = Constant<value_int = 9000000000>() t = Constant<value_int = 1>() c = Cast<to = 9>(t) "
        "y = Loop(m, c, x) <body = b (int64 i, bool k, float[2, 3] s) => (bool k2, float[2, 3] u) "
        "{ k2 = Identity(k) u = Relu(s) }>",
        "loop_without_end": "t = Constant<value_int = 1>() c = Cast<to = 9>(t) "
        "y = Loop(, c, x) <body = b (int64 i, bool k, float[2, 3] s) => (bool k2, float[2, 3] u) "
        "{ k2 = Identity(k) u = Relu(s) }>",
        "loop_without_nodes": "m = Constant<value_int = 9000000000>() t = Constant<value_int = 1>() "
        "c = Cast<to = 9>(t) y = Loop(m, c, x) <body = b (int64 i, bool k, float[2, 3] s) => "
        "(bool k, float[2, 3] s) {}>",
        "mel_weights": "a = Constant<value_int = 1000000000>() r = Constant<value_int = 16000>() "
        "l = Constant<value_float = 0.0>() u = Constant<value_float = 8000.0>() w = MelWeightMatrix(a, a, r, l, u) "
        "y = Add(x, w)",
        "growing_loop": "m = Constant<value_int = 60>() t = Constant<value_int = 1>() c = Cast<to = 9>(t) "
        "s = Constant<value_floats = [1.0, 2.0]>() y = Loop(m, c, s) <body = b (int64 i, bool k, float[n] s) => "
        "(bool k2, float[p] u) { k2 = Identity(k) u = Concat<axis = 0>(s, s) }>",
    }.items():
        yield name, body(nodes).SerializeToString()
    yield (
        "resize",
        body(
            "s = Constant<value_floats = [1.0, 1.0, 100000.0, 100000.0]>() o = Constant<value_ints = [1, 1, 2, 2]>() "
            "z = ConstantOfShape(o) y = Resize(z, , s)"
        ).SerializeToString(),
    )
    for name, nodes, axes in (
        ("images", "s = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>() y = Resize(x, , s)", "1, 1, 2, 274877906944"),
        (
            "rows_by_a_matrix",
            's = Constant<value_floats = [1.0, 2.0]>() y = Resize<mode = "linear">(x, , s)',
            "1, 1048576",
        ),
        ("items", "p = Constant<value_int = 0>() s = SplitToSequence(x) y = SequenceAt(s, p)", "1099511627776"),
        (
            "times",
            "w = Constant<value = float[1, 1, 1] {1.0}>() n = Constant<value = int32[1] {3}>() "
            "y = RNN<hidden_size = 1>(x, w, w, , n)",
            "1099511627776, 1, 1",
        ),
    ):
        yield name, body(nodes, f"float[{axes}] x").SerializeToString()
    for name, op, texts in (
        ("doubling_text", "StringConcat", [b"ab"]),
        ("split_text", "StringSplit", [b"a " * 20_000] + [b""] * 20_000),
        ("pattern", "RegexFullMatch", [b"a" * 60 + b"b"]),
    ):
        made = model('<ir_version: 10, opset_import: ["" : 20]> g (float[1] x) => (float y) {}')
        # Not by `make_tensor`, which gives each text as many bytes as the longest has.
        made.graph.initializer.add(name="s0", data_type=TensorProto.STRING, dims=[len(texts)], string_data=texts)
        for number in range(60 if op == "StringConcat" else 1):
            names = [f"s{number}"] * (2 if op == "StringConcat" else 1)
            made.graph.node.append(helper.make_node(op, names, [f"s{number + 1}"]))
        last = made.graph.node[-1]
        if op == "RegexFullMatch":
            last.attribute.append(helper.make_attribute("pattern", "(a+)+$"))
        last.output.extend(["n"] if op == "StringSplit" else [])
        made.graph.node.append(helper.make_node("Size", [last.output[0]], ["z"]))
        made.graph.node.append(helper.make_node("Cast", ["z"], ["y"], to=TensorProto.FLOAT))
        yield name, made.SerializeToString()
    for name, dims in {
        "empty_input": [0, 1 << 40, 1 << 40],
        "input_axis": [1 << 50],
        "input_axes": [1 << 39] * 3,
        "negative_input": [-4],
    }.items():
        made = model()
        del made.graph.input[0].type.tensor_type.shape.dim[:]
        for dim in dims:
            made.graph.input[0].type.tensor_type.shape.dim.add(dim_value=dim)
        yield name, made.SerializeToString()
    axes = model()
    for _ in range(1000):
        axes.graph.input[0].type.tensor_type.shape.dim.add(dim_value=1)
    yield "thousand_axes", axes.SerializeToString()
    yield "million_empty_nodes", field(7, b"\x0a\x00" * 5_000_000)
    yield "million_strings", field(7, field(1, b"\x0a\x00" * 5_000_000))
    yield "million_initialisers", field(7, b"\x2a\x00" * 300_000) + model().SerializeToString()
    yield "many_opsets", b"\x42\x00" * 300_000 + model().SerializeToString()
    named = model()
    named.graph.node[0].name = "n" * 5_000_000
    yield "name_of_megabytes", named.SerializeToString()
    many = model()
    many.graph.node[0].input.extend(["x"] * 20_000)
    yield "many_operands", many.SerializeToString()


def contradictory() -> Iterator[tuple[str, bytes]]:
    for name, fields in {
        "no_data": {"dims": [2, 3]},
        "too_few_bytes": {"dims": [2, 3], "raw_data": bytes(20)},
        "too_many_bytes": {"dims": [2, 3], "raw_data": bytes(28)},
        "far_too_few_bytes": {"dims": [1 << 20, 1 << 19], "raw_data": bytes(4)},
        "strides_overflow": {"dims": [0, 1 << 40, 1 << 40], "raw_data": b""},
        "dims_overflow": {"dims": [1 << 33, 1 << 33], "raw_data": b""},
        "negative_dims": {"dims": [-2, -3], "raw_data": bytes(24)},
        "too_few_floats": {"dims": [2, 3], "float_data": [1.0] * 5},
        "floats_of_another_type": {"dims": [2, 3], "int64_data": [1] * 6},
        "twice": {"dims": [2, 3], "float_data": [1.0] * 6, "raw_data": bytes(24)},
        "unknown_type": {"dims": [2, 3], "raw_data": bytes(24), "data_type": 99},
        "no_type": {"dims": [2, 3], "raw_data": bytes(24), "data_type": 0},
        "strings_as_bytes": {"dims": [2, 3], "raw_data": bytes(24), "data_type": TensorProto.STRING},
        "wrong_type": {"dims": [2, 3], "raw_data": bytes(48), "data_type": TensorProto.DOUBLE},
    }.items():
        yield name, with_tensor(**fields).SerializeToString()
    image = "s = Constant<value_ints = [1, 1, 2, 3]>() r = Reshape(x, s)"
    for name, nodes in {
        "shapes": "c = Constant<value_floats = [1.0, 2.0]>() y = Add(x, c)",
        "reshape": "s = Constant<value_ints = [5]>() y = Reshape(x, s)",
        "axis": "y = Softmax<axis = 7>(x)",
        "gather": "i = Constant<value_ints = [9]>() y = Gather(x, i)",
        "split": "s = Constant<value_ints = [9, 9]>() y, z = Split(x, s)",
        "transpose": "y = Transpose<perm = [0, 0]>(x)",
        "unknown_operator": "y = Sofa(x)",
        "unknown_attribute": "y = Relu<sofa = 1>(x)",
        "wrong_attribute": 'y = Softmax<axis = "one">(x)',
        "too_many_inputs": "y = Relu(x, x)",
        "too_few_inputs": "y = Add(x)",
        "no_such_value": "y = Relu(z)",
        "no_such_output": "z = Relu(x)",
        "types": "y = And(x, x)",
        "division": "y = Reshape(x, x)",
        "group": "y = Conv<group = 0>(x, x)",
        "strides": "s = Constant<value_ints = [1, 1, 2, 3]>() r = Reshape(x, s) "
        "y = MaxPool<kernel_shape = [1, 1], strides = [0, 0]>(r)",
        "dilations": f"{image} y = MaxPool<kernel_shape = [1, 1], dilations = [0, 1]>(r)",
        "negative_pads": f"{image} y = MaxPool<kernel_shape = [2, 2], pads = [-1, 0, 0, 0]>(r)",
        "kernel_of_weights": f"{image} y = ConvTranspose<kernel_shape = [1, 1]>(r, r)",
        "two_numbers_for_one": "k = Constant<value_ints = [1, 2]>() y, z = TopK(x, k)",
        "depth_of_indices": "i = Constant<value = int64[1, 3] {0, 0, 0}>() y = GatherND(x, i)",
        "depth_of_updates": "i = Constant<value = int64[1, 3] {0, 0, 0}>() u = Constant<value_floats = [1.0]>() "
        "y = ScatterND(x, i, u)",
        "more_updates_than_indices": "i = Constant<value = int64[1, 2] {0, 0}>() y = ScatterElements(x, i, x)",
        "norm": "y = LpNormalization<p = 0>(x)",
        "hidden_size": "w = Constant<value = float[1, 1, 3] {1, 2, 3}>() r = Constant<value = float[1, 1, 1] {1}>() "
        "a = Constant<value_ints = [0]>() t = Unsqueeze(x, a) y = RNN<hidden_size = 3>(t, w, r)",
        "scanned_inputs": "y = Scan<num_scan_inputs = 5, body = b (float[3] s) => (float[3] t) { t = Neg(s) }>(x)",
        "kernel": "s = Constant<value_ints = [1, 1, 2, 3]>() r = Reshape(x, s) y = MaxPool<kernel_shape = [-1, 5]>(r)",
    }.items():
        yield name, body(nodes).SerializeToString()
    for name, change in _CHANGES.items():
        made = model()
        change(made)
        yield name, made.SerializeToString()

    for name, (number, dims) in {
        "input_of_another_type": (11, [2, 3]),
        "input_of_another_rank": (1, [2, 3, 1]),
    }.items():
        made = model()
        made.graph.initializer.add(name="x", data_type=number, dims=dims, raw_data=bytes(48 if number == 11 else 24))
        yield name, made.SerializeToString()
    bytes_ = with_tensor(dims=[1], data_type=TensorProto.STRING, string_data=[b"\xff\xfe"])
    yield "text_of_bytes", bytes_.SerializeToString()
    sequence = model()
    sequence.graph.output[0].type.CopyFrom(helper.make_sequence_type_proto(sequence.graph.output[0].type))
    yield "tensor_as_a_sequence", sequence.SerializeToString()
    for name, lists in {
        "tree_of_itself": ([0, 0, 0], [0, 0, 0], [0.5, 0.0, 0.0]),
        "tree_without_children": ([9, 0, 0], [2, 0, 0], [0.5, 0.0, 0.0]),
        "tree_of_unequal_lists": ([1, 0, 0], [2, 0, 0], [0.5]),
    }.items():
        yield name, tree(*lists).SerializeToString()


def tree(true: list[int], false: list[int], values: list[float]) -> onnx.ModelProto:
    """A model with a tree of a branch and two leaves."""
    made = model('<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]> g (float[2, 3] x) => (float[2, 1] y) {}')
    numbers = {"treeids": [0] * 3, "nodeids": [0, 1, 2], "featureids": [0] * 3, "values": values}
    nodes = {**numbers, "modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "truenodeids": true, "falsenodeids": false}
    target = {"treeids": [0, 0], "nodeids": [1, 2], "ids": [0, 0], "weights": [1.0, 2.0]}
    fields = {f"nodes_{key}": value for key, value in nodes.items()}
    fields |= {f"target_{key}": value for key, value in target.items()}
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1, **fields)
    made.graph.node.append(node)
    return made


_CHANGES = {
    "no_opset": lambda m: m.ClearField("opset_import"),
    "future_opset": lambda m: setattr(m.opset_import[0], "version", 4000),
    "negative_opset": lambda m: setattr(m.opset_import[0], "version", -1),
    "two_opsets": lambda m: m.opset_import.add(domain="", version=9),
    "future_ir": lambda m: setattr(m, "ir_version", 10_000),
    "no_ir": lambda m: m.ClearField("ir_version"),
    "no_graph": lambda m: m.ClearField("graph"),
    "no_outputs": lambda m: m.graph.ClearField("output"),
    "input_twice": lambda m: m.graph.input.append(m.graph.input[0]),
    "input_of_unknown_type": lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 77),
    "input_without_type": lambda m: m.graph.input[0].ClearField("type"),
    "foreign_domain": lambda m: setattr(m.graph.node[0], "domain", "nobody.knows"),
    "sparse": lambda m: m.graph.sparse_initializer.add(),
    "input_of_another_shape": lambda m: m.graph.initializer.add(name="x", data_type=1, dims=[2], raw_data=bytes(8))
    and m.graph.input[0].type.tensor_type.shape.dim.pop(0),
}  # fmt: skip


def pathological() -> Iterator[tuple[str, bytes]]:
    """External data where no model may have any."""
    for name, location in {
        "absolute": "/etc/passwd",
        "parent": "../secret",
        "parent_within": "sub/../../secret",
        "backslash": "..\\secret",
        "no_location": "",
        "missing": "nothing.bin",
        "directory": "folder",
        "link": "link",
        "link_within": "linked/data",
        "hard_link": "hard",
        "fifo": "fifo",
        "device": "/dev/zero",
        "proc": "/proc/self/mem",
        "nul": "data\0.bin",
        "long": "d" * 5000,
        "long_path": "/".join(["d"] * 2000),
        "itself_as_url": "file:///etc/passwd",
    }.items():
        yield name, external(location=location).SerializeToString()
    yield "offset_beyond", external(location="data", offset="1000000").SerializeToString()
    yield "length_beyond", external(location="data", offset="90", length="24").SerializeToString()
    yield "other_length", external(location="data", length="12").SerializeToString()
    yield "negative_offset", external(location="data", offset="-8").SerializeToString()
    yield "offset_in_words", external(location="data", offset="eight").SerializeToString()
    yield "offset_of_many_digits", external(location="data", offset="9" * 5000).SerializeToString()
    inner = body("c = Constant<value = float[1] {1.0}>() y = Add(x, c)")
    tensor = inner.graph.node[0].attribute[0].t
    tensor.ClearField("float_data")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="data")
    yield "within_a_node", inner.SerializeToString()
    huge = with_tensor(dims=[1 << 20, 1 << 20], data_location=TensorProto.EXTERNAL)
    huge.graph.initializer[0].external_data.add(key="location", value="data")
    yield "terabytes", huge.SerializeToString()


CLASSES = (malformed, truncated, recursive, self_referential, oversized, contradictory, pathological, large)


def make(folder: Path) -> list[Path]:
    """Write all files; return their paths."""
    (folder / "secret").write_bytes(bytes(100))
    home = folder / "models"
    home.mkdir()
    (home / "data").write_bytes(np.zeros(25, np.float32).tobytes())
    (home / "folder").mkdir()
    (home / "link").symlink_to("../secret")
    (home / "linked").symlink_to(".", target_is_directory=True)
    (home / "hard").hardlink_to(folder / "secret")
    os.mkfifo(home / "fifo")
    paths = []
    for kind in CLASSES:
        for name, data in kind():
            path = home / f"{kind.__name__}_{name}.onnx"
            path.write_bytes(data)
            paths.append(path)
    return paths


if __name__ == "__main__":
    import resource
    import sys
    import tempfile
    import time

    from fmtprop.errors import ImportModelError
    from fmtprop.onnx.model import from_onnx

    only = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as temporary:
        files = make(Path(temporary))
        from_onnx(numpy_helper and model())  # what is loaded once
        for path in files:
            if only not in path.name:
                continue
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
            try:
                from_onnx(path)
                end = "ACCEPTED"
            except ImportModelError as error:
                end = f"refused {str(error).replace(temporary, '')[:150]}"
            except BaseException as error:
                end = f"CRASH {type(error).__name__}: {str(error)[:150]}"
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            print(f"{path.stem:45} {time.perf_counter() - start:6.2f} s {grown:6.0f} MB {end}", flush=True)
