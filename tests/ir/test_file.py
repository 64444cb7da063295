from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file

from fmtprop.errors import GraphError, VerifyError
from fmtprop.ir import Graph, TensorType, Value
from fmtprop.ir.file import load, save
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.structure import Slot, describe
from fmtprop.ops import Eltwise, emit
from tests.ir.graphs import TYPE, chain, same
from tests.ir.test_networkx_form import random_graphs

ZEROS = {"kind": "constant", "value": 0}
DTYPES = ["f32", "bf16", "f16", "f64", "s32", "s8", "u8", "s64", "s16", "u64", "u32", "u16", "boolean"]


def with_constants(**constants) -> Graph:
    from fmtprop.ir.tensors import tensor_type

    graph = Graph("constants")
    for name, data in constants.items():
        graph.output(graph.constant(name, tensor_type(data), data))
    return graph


def big(shift: int = 0) -> torch.Tensor:
    return torch.arange(100.0).reshape(4, 25) + shift


# ---------------------------------------------------------------- round trips


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random_graphs())
def test_round_trip_is_exact(tmp_path, graph):
    save(graph, tmp_path / "g.json")
    same(graph, load(tmp_path / "g.json"))


@pytest.mark.parametrize("weights", ["auto", "inline"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(), (0, 3), (3,), (13, 11)])
def test_every_data_type_survives(tmp_path, weights, dtype, dims):
    from fmtprop.ir.tensors import torch_dtype
    from fmtprop.layout import DataType

    type_ = TensorType(dims, dtype)
    raw = torch.randint(0, 2 if dtype == "boolean" else 256, (type_.nbytes,), dtype=torch.uint8)
    graph = with_constants(w=raw.view(torch_dtype(DataType(dtype))).reshape(dims) if type_.size else
                           torch.empty(dims, dtype=torch_dtype(DataType(dtype))))  # fmt: skip
    save(graph, tmp_path / "g.json", weights)
    same(graph, load(tmp_path / "g.json"))
    assert (tmp_path / "g.safetensors").exists() == (weights == "auto" and type_.size > 64)


def test_strides_play_no_part(tmp_path):
    base = big()
    graph = with_constants(
        t=base.t(), whole=base, again=base, column=base[:, :20], wide=base[:1].expand(5, 25), step=base[::2, ::2][:, :5]
    )
    save(graph, tmp_path / "g.json")
    same(graph, load(tmp_path / "g.json"))
    assert set(load_file(tmp_path / "g.safetensors")) == {"t", "whole", "column", "wide"}


def test_gradients_are_left_behind(tmp_path):
    graph = with_constants(w=torch.nn.Parameter(big()))
    save(graph, tmp_path / "g.json")
    assert torch.equal(load(tmp_path / "g.json").constants["w"], big())


def test_initialisers_stay_initialisers(tmp_path):
    graph = Graph("seeded")
    graph.output(graph.constant("w", TensorType((1000, 1000), "bf16"), Initialiser.normal(3, 0.0, 0.1)))
    save(graph, tmp_path / "g.json")
    same(graph, load(tmp_path / "g.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]


def test_infinities_and_structure_survive(tmp_path):
    graph = chain()
    graph.structure = describe([("x", Slot(0)), ("ü", None)], [], [Slot(0), Slot(1), {"inf": 1e300}])
    value = emit(graph, "eltwise", {"src": Value("b")}, Eltwise("clip", float("-inf"), float("inf")))
    graph.output(value)
    save(graph, tmp_path / "g.json")
    same(graph, load(tmp_path / "g.json"))


@pytest.mark.parametrize("structure", ["{", "[]", "[" * 100_000, '{"positional":[],"keyword":[],"results":{"slot":0}}'])
def test_a_malformed_structure_is_refused_where_the_file_is_read(tmp_path, structure):
    graph = chain()
    graph.structure = structure
    save(graph, tmp_path / "g.json")
    with pytest.raises(GraphError, match=r"g\.json: graph structure: "):
        load(tmp_path / "g.json")


def test_outputs_keep_their_order_when_an_early_one_waits(tmp_path):
    graph = chain()
    late = emit(graph, "eltwise", {"src": Value("a")}, Eltwise("abs"), name="late")
    graph.set_input("y", "src", late)
    save(graph, tmp_path / "g.json")
    again = load(tmp_path / "g.json")
    same(graph, again)
    assert [node.name for node in again.output_nodes] == ["y", "z"]


def test_a_node_is_a_line(tmp_path):
    graph = chain()
    save(graph, tmp_path / "g.json")
    before = (tmp_path / "g.json").read_text().splitlines()
    graph.replace(graph.node("b").with_(attrs=Eltwise("abs")))
    save(graph, tmp_path / "g.json")
    after = (tmp_path / "g.json").read_text().splitlines()
    assert len(before) == len(after) == len(graph) + 5
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    assert after[4] == '{"name": "a", "op": "eltwise", "inputs": {"src": "x"}, ' + (
        '"attrs": {"alg": "relu", "alpha": 0.0, "beta": 0.0}, "results": [{"dims": [2, 8], "dtype": "f32"}]},'
    )


def test_saving_needs_a_sound_graph(tmp_path):
    graph = chain()
    del graph.constants["w"]
    with pytest.raises(VerifyError, match=r"V6: node w \(constant\) has no data"):
        save(graph, tmp_path / "g.json")
    with pytest.raises(GraphError, match=r"weights must be .*, got 'none'"):
        save(chain(), tmp_path / "g.json", "none")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- hostile files


def flawed(tmp_path, text: str | bytes) -> str:
    path = tmp_path / "bad.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(GraphError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        (b"\x80\x02}q\x00.", "is not a graph file: byte 0 is not UTF-8 text"),
        ('{"format": ', "line 1, column 12: is not JSON: Expecting value"),
        ('{"format": "fmtprop-graph",\n"nodes": [}', "line 2, column 11: is not JSON"),
        ("[]", "is not a graph file: \"format\" must be 'fmtprop-graph', got 'list'"),
        ('{"format": "onnx"}', "is not a graph file: \"format\" must be 'fmtprop-graph', got 'onnx'"),
        ('{"format": "fmtprop-graph", "version": 2}', '"version" is 2, this program reads version 1'),
        ('{"format": "fmtprop-graph", "version": true}', '"version" is True'),
        ('{"format": "fmtprop-graph"}', '"version" is None'),
        ('{"format": "fmtprop-graph", "version": 1}', '"name" must be str, got None'),
        ('{"version": 1, "version": 1}', "has the key 'version' twice in one object"),
        ('{"a": NaN}', "has the token NaN, which JSON lacks"),
        ('{"a": -Infinity}', "has the token -Infinity, which JSON lacks"),
        ('{"a": 1e999}', "has the number 1e999, which no float holds"),
        ('{"a": ' + "9" * 5000 + "}", "has the integer 9999999999999999999999999999999999999999, which"),
        ("[" * 100_000, "is nested too deeply"),
        ("[" * 101 + "]" * 101, "is nested too deeply to be a graph file: more than 100 levels"),
        ('{"a": -9223372036854775809}', "has the integer -9223372036854775809, which does not fit in 64 bits"),
        ('{"a": 18446744073709551616}', "has the integer 18446744073709551616, which does not fit in 64 bits"),
    ],
)
def test_a_file_that_is_no_graph_file(tmp_path, text, message):
    assert message in flawed(tmp_path, text)


def test_a_missing_file(tmp_path):
    with pytest.raises(GraphError, match=r"nope\.json: cannot be read: No such file"):
        load(tmp_path / "nope.json")
    with pytest.raises(GraphError, match="cannot be read: it is a directory, not a file"):
        load(tmp_path)


def document(tmp_path) -> dict:
    graph = chain()
    graph.output(graph.constant("big", TensorType((4, 25)), big()))
    save(graph, tmp_path / "bad.json")
    return json.loads((tmp_path / "bad.json").read_text())


def row(document: dict, name: str) -> dict:
    return next(row for row in document["nodes"] if row["name"] == name)


def nested(depth: int) -> list:
    return json.loads("[" * depth + "]" * depth)


def put(name: str, **changes):
    return lambda d: row(d, name).update(changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(extra=1), "unknown key 'extra'"),
        (lambda d: d.update(nodes={}), '"nodes" must be list, got {}'),
        (lambda d: d.update(nodes=[3]), 'nodes[0] must be an object with a "name"'),
        (lambda d: d["nodes"].append({"name": "a"}), "nodes[8] (a): there is another node of this name"),
        (lambda d: d["nodes"].pop(0), "nodes[0] (a): inputs.src names 'x', but there is no such node"),
        (put("a", inputs=[]), "nodes[1] (a): inputs must map operands to nodes, got []"),
        (put("a", inputs={"src": 3}), 'nodes[1] (a): inputs.src must be "node" or ["node", index], got 3'),
        (put("a", inputs={"src": ["x", True]}), 'nodes[1] (a): inputs.src must be "node" or ["node", index]'),
        (put("a", inputs={"src": ["x", 5]}), "operand src reads result 5 of node x (input), which has 1"),
        (put("a", inputs={"src": "b"}), "graph chain has a cycle: "),
        (put("a", inputs={}), "node a (eltwise): op eltwise needs operand 'src'"),
        (put("a", op="relu"), "node a (relu): unknown op 'relu'"),
        (put("a", attrs={"alg": ["relu"]}), "node a (eltwise): attribute alg is ['relu'], must be str"),
        (put("a", attrs={"alg": "relu", "alpha": {"float": "big"}}), "nodes[1] (a): {'float': 'big'} must be"),
        (put("a", attrs={"alg": "relu", "alpha": nested(500)}), "is nested too deeply to be a graph file"),
        (put("a", attrs={"alg": "relu", "alpha": nested(50)}), "node a (eltwise): attribute alpha is [[["),
        (put("a", attrs={"alg": "relu", "alpha": 1e300}), "alpha is 1e+300, must be a number within the range of f32"),
        (
            put("a", attrs={"alg": "relu", "alpha": 3.5e38}),
            "alpha is 3.5e+38, must be a number within the range of f32",
        ),
        (put("a", attrs={"alg": "relu", "alpha": True}), "alpha is True, must be a number within the range of f32"),
        (put("a", attrs={}), "node a (eltwise): attribute 'alg' is missing; Eltwise has ['alg', 'alpha', 'beta']"),
        (
            lambda d: row(d, "a").update(op="concat", attrs={"axis": 2**63}),
            f"attribute axis is {2**63}, must be an integer of 64 bits",
        ),
        (put("a", shape=[1]), "nodes[1] (a): unknown key 'shape'"),
        (put("a", results=None), "node a (eltwise): results must be a list, got None"),
        (put("a", results=[{"dims": [2, 9], "dtype": "f32"}]), "V7: node a (eltwise): recorded results are [f32[2,9]]"),
        (put("a", data={"base64": ""}), "nodes[1] (a): data: base64 holds 0 bytes, f32[2,8] needs 64"),
        (put("w", data={"pickle": "gASV"}), "nodes[3] (w): data must have one of the keys init, base64, tensor"),
        (put("w", data={"base64": "%%"}), "nodes[3] (w): data: base64 must be text in base64"),
        (put("w", data={"base64": "AAAA"}), "nodes[3] (w): data: base64 holds 3 bytes, f32[2,8] needs 64"),
        (put("w", data={"tensor": "v"}), "nodes[3] (w): data: the side file 'bad.safetensors' has no tensor 'v'"),
        (put("w", data={"tensor": "big"}), "tensor 'big' of the side file is f32[4,25], the node declares f32[2,8]"),
        (put("w", data={"init": {"kind": "magic"}}), "nodes[3] (w): data: initialiser: unknown kind 'magic'"),
        (
            put("w", data={"init": {"kind": "constant", "value": 1e300}}),
            "nodes[3] (w): data: initialiser constant: value 1e+300 overflows data type float32",
        ),
        (put("w", results=[]), "nodes[3] (w): a constant needs one result with dims and dtype, got []"),
        (
            put("w", results=[{"dims": [2**40, 2**40], "dtype": "f32"}], data={"init": ZEROS}),
            "nodes[3] (w): f32[1099511627776,1099511627776] needs 4835703278458516698824704 bytes, a constant may have",
        ),
        (put("x", results=[{"dims": [2**62, 4], "dtype": "f32"}]), "more than 64-bit offsets reach"),
        (lambda d: row(d, "w").pop("data"), "V6: node w (constant) has no data"),
        (lambda d: d.update(weights="../bad.safetensors"), "\"weights\" is '../bad.safetensors', must be the name of"),
        (lambda d: d.update(weights="/etc/passwd"), "\"weights\" is '/etc/passwd', must be the name of"),
        (lambda d: d.update(weights="a\\b.safetensors"), "must be the name of a .safetensors file in the same folder"),
        (lambda d: d.update(weights=3), '"weights" is 3, must be the name of'),
        (lambda d: d.update(weights="gone.safetensors"), "its weights are missing: there is no "),
    ],
)
def test_a_flaw_is_named(tmp_path, edit, message):
    data = document(tmp_path)
    edit(data)
    assert message in flawed(tmp_path, json.dumps(data))


@pytest.mark.parametrize("name", ["x" * 10**7, "\x1b[2J\x9b31m", "a\nb", "\u202e", "a" * 300 + "\0"])
def test_a_name_of_any_kind_is_shown_short_and_escaped(tmp_path, name):
    data = document(tmp_path)
    data["nodes"] = json.loads(json.dumps(data["nodes"]).replace('"a"', json.dumps(name)))
    row(data, name)["attrs"] = {}
    message = flawed(tmp_path, json.dumps(data))
    assert message.isprintable() and len(message) < 1000
    assert message.endswith("(eltwise): attribute 'alg' is missing; Eltwise has ['alg', 'alpha', 'beta']")


@pytest.mark.parametrize("alpha", [{"float": "nan"}, {"float": "-inf"}, 3.4e38, 1])
def test_what_a_float_may_be(tmp_path, alpha):
    data = document(tmp_path)
    row(data, "a")["attrs"] = {"alg": "relu", "alpha": alpha}
    (tmp_path / "bad.json").write_text(json.dumps(data))
    assert isinstance(load(tmp_path / "bad.json").node("a").attrs.alpha, int | float)


def test_what_stands_in_a_file_s_place_is_called_so(tmp_path):
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(GraphError, match=r"fifo\.json: cannot be read: it is a fifo, not a file"):
        load(tmp_path / "fifo.json")
    text = json.dumps(document(tmp_path))
    side = tmp_path / "bad.safetensors"
    side.unlink()
    os.mkfifo(side)
    assert f"its weights {side} cannot be read: it is a fifo, not a file" in flawed(tmp_path, text)


def test_weights_that_may_not_be_read_are_not_missing(tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    text = json.dumps(document(tmp_path))
    monkeypatch.setattr("fmtprop.ir.file_data.check_readable", refuse)  # tests may run as root, who may read everything
    assert flawed(tmp_path, text).endswith("bad.safetensors cannot be read: Permission denied")


def test_another_program_s_weights_are_not_replaced(tmp_path):
    save_file({"theirs": torch.ones(3)}, tmp_path / "net.safetensors")
    (tmp_path / "other.json").write_text('{"name": "my-package"}')
    graph = with_constants(w=big())
    for name in ("net", "other"):
        with pytest.raises(OSError, match="did not come from here and is not replaced"):
            save(graph, tmp_path / f"{name}.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.safetensors", "other.json"]
    assert load_file(tmp_path / "net.safetensors").keys() == {"theirs"}
    for _ in range(2):
        save(graph, tmp_path / "ours.json")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_both_files_are_for_whom_the_mask_says(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        save(with_constants(w=big()), tmp_path / "g.json")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


def test_a_document_beyond_any_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("fmtprop.ir.file.MAX_NBYTES", 100)
    with pytest.raises(GraphError, match=r"needs \d+ bytes, a graph file may have 100"):
        save(chain(), tmp_path / "g.json")
    assert "cannot be read: it is larger than 100 bytes" in flawed(tmp_path, "{}" * 100)


def test_a_damaged_side_file(tmp_path):
    text = json.dumps(document(tmp_path))
    side = tmp_path / "bad.safetensors"
    side.write_bytes(side.read_bytes()[:-7])
    assert f"its weights {side} cannot be read" in flawed(tmp_path, text)


def test_an_exchanged_side_file(tmp_path):
    text = json.dumps(document(tmp_path))
    save_file({"big": torch.zeros(4, 25, dtype=torch.bfloat16)}, tmp_path / "bad.safetensors")
    assert "tensor 'big' of the side file is bf16[4,25], the node declares f32[4,25]" in flawed(tmp_path, text)


def test_a_truncated_file_never_loads(tmp_path):
    document(tmp_path)
    text = (tmp_path / "bad.json").read_bytes().rstrip()
    for size in range(0, len(text), 37):
        flawed(tmp_path, text[:size])


def test_types_of_the_toy_graph():
    assert chain().type_of(Value("a")) == TYPE
