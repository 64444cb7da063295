"""Honest archives pass and load; hostile ones are refused by name before PyTorch sees them."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fmtprop.archive import pickle_safety, program_safety
from fmtprop.archive.pt2_safety import check_archive
from fmtprop.errors import ImportModelError
from tests.archive.archives import pack, read_members, save

# ---------------------------------------------------------------- honest archives


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.register_buffer("gain", torch.ones(4, 1, 1))
        self.shift = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.conv(x)) * self.gain + self.shift.sum()).relu()


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, more: Any, flag: bool = True) -> Any:
        return {"y": x + more["a"] * 2, "z": [x @ more["b"], (x > 0) & (x < 1)], "n": torch.tensor([1.0, 2.0])}


class Branch(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


class Dynamic(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        return torch.cat([x[:, :half], x[:, half:]], 1) * max(x.shape[0], 7) * 1.5


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.second = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).t())


def export_net() -> torch.export.ExportedProgram:
    return torch.export.export(Net().eval(), (torch.randn(1, 3, 8, 8),))


def export_nested() -> torch.export.ExportedProgram:
    more = {"a": torch.randn(2, 2), "b": torch.randn(2, 2)}
    return torch.export.export(Nested(), (torch.randn(2, 2),), {"more": more, "flag": False})


def export_branch() -> torch.export.ExportedProgram:
    return torch.export.export(Branch(), (torch.randn(3),))


def export_dynamic() -> torch.export.ExportedProgram:
    shapes = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.AUTO}}
    return torch.export.export(Dynamic(), (torch.randn(4, 8),), dynamic_shapes=shapes)


def export_tied() -> torch.export.ExportedProgram:
    return torch.export.export(Tied().eval(), (torch.randn(4, 4, dtype=torch.bfloat16),))


HONEST = [export_net, export_nested, export_branch, export_dynamic, export_tied]


@pytest.mark.parametrize("export", HONEST)
def test_honest_archive_passes_and_loads(export: Callable[[], torch.export.ExportedProgram], tmp_path: Path) -> None:
    program = export()
    path = tmp_path / "model.pt2"
    torch.export.save(program, path, extra_files={"note.txt": "hello"})
    check_archive(path)
    loaded = torch.export.load(path)
    assert [str(node.target) for node in loaded.graph.nodes] == [str(node.target) for node in program.graph.nodes]


def test_dynamic_archive_has_the_parts_that_are_evaluated(tmp_path: Path) -> None:
    """The honest expressions that the grammar must accept are really there."""
    path = tmp_path / "model.pt2"
    torch.export.save(export_dynamic(), path)
    text = read_members(path.read_bytes())["models/model.json"].decode()
    assert '"expr_str"' in text and "Symbol(" in text
    assert json.loads(text)["guards_code"] != []


def test_pickle_protocol_4_passes(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(export_nested(), path, pickle_protocol=4)
    inputs = read_members(path.read_bytes())["data/sample_inputs/model.pt"]
    assert pickle.FRAME in read_members(inputs)["data.pkl"]
    check_archive(path)


def test_flat_archive_of_earlier_versions_passes_and_loads(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    program = export_net()
    path.write_bytes(flat_archive(program))
    check_archive(path)
    assert torch.export.load(path).state_dict.keys() == program.state_dict.keys()


def test_time_does_not_depend_on_the_weights(tmp_path: Path) -> None:
    """Raw weights are never looked at, whatever they look like."""
    members = {**HONEST_MEMBERS, "data/weights/weight_0": b"PK\x03\x04" + b"cos\nsystem\n" * 78 + b"...."}
    assert len(members["data/weights/weight_0"]) > len(HONEST_MEMBERS["data/weights/weight_0"])
    path = tmp_path / "model.pt2"
    path.write_bytes(pack(members))
    check_archive(path)


# ---------------------------------------------------------------- tools to make hostile ones


def flat_archive(program: torch.export.ExportedProgram) -> bytes:
    from torch._export.serde.schema import SCHEMA_VERSION
    from torch._export.serde.serialize import serialize

    artifact = serialize(program)
    members = {
        "version": ".".join(map(str, SCHEMA_VERSION)).encode(),
        "serialized_exported_program.json": artifact.exported_program,
        "serialized_state_dict.pt": artifact.state_dict,
        "serialized_constants.pt": artifact.constants,
        "serialized_example_inputs.pt": artifact.example_inputs,
    }
    return pack(members, root="")


HONEST_BYTES = save(export_net())
HONEST_MEMBERS = read_members(HONEST_BYTES)
INPUTS = "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
PROGRAM = "models/model.json"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo this must never run > pwned",)


def refused(content: bytes, tmp_path: Path) -> str:
    """Return the message with which an archive is refused, having checked that nothing ran."""
    path = tmp_path / "hostile.pt2"
    path.write_bytes(content)
    before = Path("pwned").exists()
    with pytest.raises(ImportModelError) as caught:
        check_archive(path)
    assert Path("pwned").exists() == before
    message = str(caught.value)
    assert "hostile.pt2" in message
    return message


def with_inputs_pickle(program: bytes) -> bytes:
    """Return the honest archive with another pickle as its example inputs."""
    inputs = read_members(HONEST_MEMBERS[INPUTS])
    inputs["data.pkl"] = program
    return pack({**HONEST_MEMBERS, INPUTS: pack(inputs, root="archive/")})


def with_program(edit: Callable[[Any], None]) -> bytes:
    program = json.loads(HONEST_MEMBERS[PROGRAM])
    edit(program)
    return pack({**HONEST_MEMBERS, PROGRAM: json.dumps(program).encode()})


def with_config(member: str, **changes: Any) -> bytes:
    config = json.loads(HONEST_MEMBERS[member])
    next(iter(config["config"].values())).update(changes)
    return pack({**HONEST_MEMBERS, member: json.dumps(config).encode()})


def test_the_tools_make_archives_that_pass(tmp_path: Path) -> None:
    """Packing anew changes nothing, so what is refused below is refused for the one thing that differs."""
    path = tmp_path / "model.pt2"
    honest_pickle = read_members(HONEST_MEMBERS[INPUTS])["data.pkl"]
    for content in (pack(HONEST_MEMBERS), with_inputs_pickle(honest_pickle), with_program(lambda program: None)):
        path.write_bytes(content)
        check_archive(path)
        torch.export.load(path)
    path.write_bytes(with_config(WEIGHTS, is_param=True))
    check_archive(path)


# ---------------------------------------------------------------- pickles


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_that_runs_a_command(protocol: int, tmp_path: Path) -> None:
    message = refused(with_inputs_pickle(pickle.dumps(Evil(), protocol=protocol)), tmp_path)
    assert f"member {INPUTS!r}" in message and "member 'data.pkl'" in message
    assert f"names {os.system.__module__}.system, which is not on the list" in message
    assert "torch.export.load" in message


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickle_that_hides_a_command_deep_inside(protocol: int, tmp_path: Path) -> None:
    hidden = ((torch.Size([1]), {"a": [1, 2, {"b": Evil()}]}), {})
    assert "system, which is not on the list" in refused(
        with_inputs_pickle(pickle.dumps(hidden, protocol=protocol)), tmp_path
    )


def string(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


ORDERED_DICT = b"ccollections\nOrderedDict\n"
STORAGE = b"(" + string("storage") + b"ctorch\nFloatStorage\n" + string("0") + string("cpu")

PICKLES = {
    "names by STACK_GLOBAL": (b"\x80\x04" + string("os") + string("system") + b"\x93.", "names os.system"),
    "names by recalled strings": (
        b"\x80\x04" + string("os") + b"\x940" + string("system") + b"\x940h\x00h\x01\x93.",
        "uses the pickle instruction POP",
    ),
    "names by strings from the memo": (
        b"\x80\x04(" + string("os") + b"\x94" + string("system") + b"\x94th\x00h\x01\x93.",
        "names os.system",
    ),
    "names by a computed string": (b"\x80\x04" + ORDERED_DICT + b")R" + string("system") + b"\x93.", "it computes"),
    "names by a frame inside a frame": (
        b"\x80\x04\x95\x15\0\0\0\0\0\0\0\x95\x0c\0\0\0\0\0\0\0" + string("os") + string("system") + b"\x93.",
        "names os.system",
    ),
    "names in disguise": (b"ctor\\x63h._utils\n_rebuild_tensor_v2\n.", "in a disguised way"),
    "names an attribute path": (
        b"\x80\x04" + string("torch") + string("os.system") + b"\x93.",
        "names torch.os.system",
    ),
    "names something of torch": (b"ctorch.hub\nload\n.", "names torch.hub.load"),
    "INST": (b"(ios\nsystem\n.", "uses the pickle instruction INST"),
    "OBJ": (b"(" + ORDERED_DICT + b"o.", "uses the pickle instruction OBJ"),
    "NEWOBJ": (b"\x80\x02" + ORDERED_DICT + b")\x81.", "uses the pickle instruction NEWOBJ"),
    "NEWOBJ_EX": (b"\x80\x04" + ORDERED_DICT + b")}\x92.", "uses the pickle instruction NEWOBJ_EX"),
    "EXT1": (b"\x80\x02\x82\x01.", "uses the pickle instruction EXT1"),
    "EXT4": (b"\x80\x02\x84\x01\0\0\0.", "uses the pickle instruction EXT4"),
    "PERSID": (b"Pstorage\n.", "uses the pickle instruction PERSID"),
    "DUP": (b"N2.", "uses the pickle instruction DUP"),
    "calls a class that is data": (b"\x80\x02ctorch\nFloatStorage\n(J\xff\xff\xff\x7ftR.", "calls torch.FloatStorage"),
    "calls a computed value": (b"\x80\x02" + ORDERED_DICT + b")R)R.", "calls a value that it computed"),
    "calls with a list": (b"\x80\x02" + ORDERED_DICT + b"]R.", "with something other than a tuple"),
    "rebuilds by another function": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(" + ORDERED_DICT + b"ctorch\nTensor\n)}tR.",
        "rebuilds something other than a plain tensor",
    ),
    "sets any attribute": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n)}"
        + string("__class__")
        + b"NstR.",
        "rebuilds something other than a plain tensor",
    ),
    "BUILD on a tensor": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R}b.",
        "sets the state of an object that is not an OrderedDict",
    ),
    "SETITEM on a tensor": (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)RNNs.", "sets items of an object"),
    "APPEND to a tensor": (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)RNa.", "appends to an object"),
    "huge memo": (b"\x80\x02Nr\xff\xff\xff\xff.", "stores memo entry 4294967295 where 0 is next"),
    "unknown memo": (b"\x80\x02h\x07.", "recalls memo entry 7"),
    "no stack": (b"\x80\x02R.", "takes a value from an empty stack"),
    "below the mark": (b"\x80\x02N(\x85.", "takes a value from an empty stack"),
    "no mark": (b"\x80\x02Nt.", "a mark that is not there"),
    "open mark": (b"\x80\x02N(.", "ends with something left over"),
    "two values": (b"\x80\x02NN.", "ends with something left over"),
    "a second pickle": (b"\x80\x02N.cos\nsystem\n.", "goes on for 12 bytes after its end"),
    "no end": (b"\x80\x02N", "is a damaged pickle"),
    "empty": (b"", "is a damaged pickle"),
    "cut in a string": (b"\x80\x04\x8c\xffabc", "is a damaged pickle"),
    "unknown instruction": (b"\x80\x02\xff.", "is a damaged pickle"),
    "no escape in a name": (b"\x80\x02ctorch._ut\\ils\n_rebuild_tensor_v2\n.", "is a damaged pickle"),
    "unknown protocol": (b"\x80\x4eN.", "is written in pickle protocol 78, which does not exist"),
    "reads past a record": (b"\x80\x02" + STORAGE + b"M\xff\xfftQ.", "reads 65535 elements (262140 bytes) of record"),
    "reads backwards": (b"\x80\x02" + STORAGE + b"J\xff\xff\xff\xfftQ.", "reads -1 elements"),
    "reads a missing record": (b"\x80\x02" + STORAGE.replace(b"\x010", b"\x019") + b"K\x01tQ.", "record 'data/9'"),
    "reads something else": (b"\x80\x02" + string("module") + b"Q.", "something other than the data of a tensor"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_hostile_pickle(name: str, tmp_path: Path) -> None:
    program, expected = PICKLES[name]
    assert expected in refused(with_inputs_pickle(program), tmp_path)


def test_key_of_an_input_that_would_end_its_quotes(tmp_path: Path) -> None:
    """PyTorch writes guards from the keys of example inputs."""
    for key in ("a'b", 'a"b', "a\\b", "a\nb", ("c", "a'b")):
        content = with_inputs_pickle(pickle.dumps((({key: 1},), {}), protocol=2))
        assert "with quotes or control characters (at byte" in refused(content, tmp_path)


def test_too_large_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_safety, "LARGEST_PICKLE_NBYTES", 100)
    assert "bytes; the limit is 100" in refused(HONEST_BYTES, tmp_path)


class Recorder(pickle.Unpickler):
    """Run a pickle with every name replaced by something harmless, and note the names."""

    def __init__(self, program: bytes) -> None:
        super().__init__(io.BytesIO(program))
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.names.add((module, name))
        return lambda *arguments: {}

    def persistent_load(self, pid: Any) -> Any:
        return None


FUZZED = [read_members(HONEST_MEMBERS[INPUTS])["data.pkl"], *(program for program, _ in PICKLES.values())]


@settings(max_examples=300)
@given(st.data())
def test_whatever_passes_names_only_what_is_on_the_list(data: st.DataObject) -> None:
    """The check and the real unpickler read mutated pickles alike."""
    program = bytearray(data.draw(st.sampled_from(FUZZED)))
    other = data.draw(st.sampled_from(FUZZED))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(program)))
        start, length = data.draw(st.integers(0, len(other))), data.draw(st.integers(0, 12))
        program[at : at + data.draw(st.integers(0, 4))] = other[start : start + length]
    try:
        pickle_safety.check_pickle(bytes(program), "fuzzed", {"0": 1 << 40})
    except ImportModelError:
        return
    recorder = Recorder(bytes(program))
    # A name may stand where the real function would object to its arguments: only the names matter here.
    with suppress(TypeError, AttributeError, pickle.UnpicklingError):
        recorder.load()
    allowed = {("torch", name) for name in [*pickle_safety.STORAGES, *pickle_safety.DTYPES, "Tensor"]}
    assert recorder.names <= pickle_safety.CALLABLE | allowed


# ---------------------------------------------------------------- members


MEMBERS = {
    "compiled code": ("data/aotinductor/model/a.so", "compiled code, which PyTorch would load into this process"),
    "torch class": ("data/constants/custom_obj_0", "a Python or C++ object"),
    "python object": ("data/constants/opaque_obj_0", "a Python or C++ object"),
    "TorchScript": ("code/__torch__.py", "TorchScript code"),
    "unknown": ("data/plugins/a", "of a kind that fmtprop does not know"),
    "program in another place": ("models/a.txt", "of a kind that fmtprop does not know"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_member_that_is_code_or_unknown(name: str, tmp_path: Path) -> None:
    member, expected = MEMBERS[name]
    message = refused(pack({**HONEST_MEMBERS, member: b"x"}), tmp_path)
    assert expected in message and repr(member) in message


@pytest.mark.parametrize("member", [INPUTS, "data/weights/model.pt", "data/constants/model.pt"])
def test_pickle_that_is_no_zip_file(member: str, tmp_path: Path) -> None:
    legacy = io.BytesIO()
    torch.save({"a": torch.ones(1)}, legacy, _use_new_zipfile_serialization=False)
    for content in (legacy.getvalue(), pickle.dumps(Evil())):
        message = refused(pack({**HONEST_MEMBERS, member: content}), tmp_path)
        assert f"member {member!r} is not a zip file" in message


def test_archive_nested_twice(tmp_path: Path) -> None:
    inputs = read_members(HONEST_MEMBERS[INPUTS])
    inner = pack({"data.pkl": pickle.dumps(Evil(), protocol=2)}, root="archive/")
    content = pack({**HONEST_MEMBERS, INPUTS: pack({**inputs, "data.pkl": inner}, root="archive/")})
    assert "member 'data.pkl' is a damaged pickle" in refused(content, tmp_path)
    content = pack({**HONEST_MEMBERS, INPUTS: pack({**inputs, "more.pt": inner}, root="archive/")})
    assert "has member 'more.pt', which torch.save does not write" in refused(content, tmp_path)
    content = pack({**HONEST_MEMBERS, INPUTS: pack({**inputs, "constants.pkl": b"N."}, root="archive/")})
    assert "has member 'constants.pkl'" in refused(content, tmp_path)


def test_tensor_file_in_two_folders_or_without_pickle(tmp_path: Path) -> None:
    inputs = read_members(HONEST_MEMBERS[INPUTS])
    two = pack({**{f"a/{name}": data for name, data in inputs.items()}, "b/data.pkl": b"N."}, root="")
    assert "has members in several folders: a, b" in refused(pack({**HONEST_MEMBERS, INPUTS: two}), tmp_path)
    del inputs["data.pkl"]
    none = pack(inputs, root="archive/")
    assert "has no member 'data.pkl'" in refused(pack({**HONEST_MEMBERS, INPUTS: none}), tmp_path)


def test_pickled_weight_is_looked_at(tmp_path: Path) -> None:
    evil = pack({"data.pkl": pickle.dumps(Evil(), protocol=2)}, root="archive/")
    content = read_members(with_config(WEIGHTS, use_pickle=True))
    message = refused(pack({**content, "data/weights/weight_0": evil}), tmp_path)
    assert "'conv.weight' lies in 'weight_0'" in message and "system, which is not on the list" in message


CONFIGS = {
    "leads out": (
        WEIGHTS,
        {"path_name": "../sample_inputs/model.pt"},
        "'../sample_inputs/model.pt', which is no member",
    ),
    "absolute": (WEIGHTS, {"path_name": "/etc/passwd"}, "which is no member"),
    "not a name": (WEIGHTS, {"path_name": 7}, "lies in 7, which is no member"),
    "another kind": (WEIGHTS, {"path_name": "model_weights_config.json"}, "which does not hold a tensor"),
    "missing object": (CONSTANTS, {"path_name": "custom_obj_0"}, "which is no member"),
    "truthy": (WEIGHTS, {"use_pickle": "yes"}, "does not say whether it is pickled: use_pickle='yes'"),
    "no size": (WEIGHTS, {"tensor_meta": None}, "has no fixed size"),
    "dynamic size": (WEIGHTS, {"tensor_meta": {"sizes": [{"as_expr": {"expr_str": "s0"}}]}}, "has no fixed size"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_hostile_list_of_weights(name: str, tmp_path: Path) -> None:
    member, changes, expected = CONFIGS[name]
    assert expected in refused(with_config(member, **changes), tmp_path)


def test_weight_without_data_that_would_fill_the_memory(tmp_path: Path) -> None:
    members = read_members(with_config(WEIGHTS, tensor_meta={"sizes": [{"as_int": 1 << 40}]}))
    message = refused(pack({**members, "data/weights/weight_0": b""}), tmp_path)
    assert "'conv.weight' declares 1099511627776 elements but has no data" in message


def test_list_of_weights_of_another_form(tmp_path: Path) -> None:
    for text in (b"[]", b'{"config": []}'):
        assert "is not a list of weights" in refused(pack({**HONEST_MEMBERS, WEIGHTS: text}), tmp_path)


# ---------------------------------------------------------------- the program


def test_flat_archive_is_looked_at(tmp_path: Path) -> None:
    evil = pack({"data.pkl": pickle.dumps(Evil(), protocol=2)}, root="archive/")
    with zipfile.ZipFile(io.BytesIO(flat_archive(export_branch()))) as file:
        members = {name: file.read(name) for name in file.namelist()}
    for member in ("serialized_state_dict.pt", "serialized_constants.pt", "serialized_example_inputs.pt"):
        message = refused(pack({**members, member: evil}, root=""), tmp_path)
        assert repr(member) in message and "system, which is not on the list" in message
    message = refused(pack({**members, "serialized_state_dict.json": evil}, root=""), tmp_path)
    assert "'serialized_state_dict.json' is of a kind that fmtprop does not know" in message


def test_archive_of_two_forms_at_once(tmp_path: Path) -> None:
    """PyTorch takes the folder of the first member for the root, and would find another archive there."""
    within = {f"extra_files/{name}": data for name, data in HONEST_MEMBERS.items()}
    content = pack({**within, "version": b"8.1", "serialized_exported_program.json": b"{}"}, root="")
    assert "its first member 'extra_files/data/weights/weight_0' lies in a folder" in refused(content, tmp_path)


SIZES = {
    "__import__('os').system('id')": "is not part of a size",
    "Symbol('s0', positive=exec('x'))": "is not a symbol",
    "Symbol('s0', positive='x')": "is not a symbol",
    "Symbol('a b')": "is not a symbol",
    "Add('__import__(1)', 1)": "is not part of a size",
    "Float('__import__(1)')": "is not a number",
    "Float('1.5', dps='x')": "is not a number",
    "eval(s0)": "is not part of a size",
    "s0.__class__": "is not part of a size",
    "[s0 for s0 in s1]": "is not part of a size",
    "lambda: 0": "is not part of a size",
    "Add(*s0)": "is not part of a size",
    "Pow(Integer(9), Integer(999999999))": "the exponent 999999999 is too large",
    "9**9**9**999": "the exponent 999 is too large",
    "1 << 99999999999": "the exponent 99999999999 is too large",
    "__builtins__": "is not part of a size",
    "s0 +": "is not an expression",
    "(" * 5000: "is not an expression",
    "a" + ".a" * 900: "is not part of a size",
    "1+" * 20000 + "1": "characters, more than",
}


@pytest.mark.parametrize("text", SIZES, ids=lambda text: text[:40])
def test_hostile_size(text: str, tmp_path: Path) -> None:
    def edit(program: Any) -> None:
        node = program["graph_module"]["graph"]["nodes"][0]
        node["inputs"][0]["arg"] = {"as_sym_int": {"as_expr": {"expr_str": text, "hint": None}}}

    message = refused(with_program(edit), tmp_path)
    assert f"member {PROGRAM!r} has the size expression" in message and SIZES[text] in message


@pytest.mark.parametrize(
    "text",
    [
        "s0",
        "2*s77 + 1",
        "Mul(Integer(2), Symbol('s77', positive=True, integer=True))",
        "TruncToInt(Mul(Float('1.5', precision=53), ToFloat(Symbol('s56', positive=True, integer=True))))",
        "Pow(Symbol('s0', integer=True), Integer(2))",
        "(s0 <= 4) & (s1 != -1)",
        "Max(1, s0//2)",
    ],
)
def test_honest_size(text: str) -> None:
    program_safety.check_program(json.dumps({"expr_str": text}).encode(), "model.json")


PIECES = [
    "s0",
    "(",
    ")",
    ".",
    "L",
    "['x']",
    "size",
    "Symbol",
    "'a'",
    ",",
    "=",
    "+",
    "**",
    "<<",
    "Pow",
    "9",
    "-",
    "[",
    "]",
]
PIECES += [
    " ",
    "Float",
    "lambda",
    ":",
    "for",
    "in",
    "*",
    "not ",
    "if ",
    "else ",
    "Max",
    "{",
    "}",
    "\\",
    '"',
    "f",
    "~",
    "@",
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.sampled_from(["expr_str", "guards_code"]))
def test_any_expression_is_refused_or_of_the_grammar(text: str, key: str) -> None:
    try:
        program_safety.check_program(json.dumps({key: text}).encode(), "model.json")
    except ImportModelError:
        return
    harmless = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context, ast.keyword)
    harmless += (ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)
    for node in ast.walk(ast.parse(text, mode="eval").body):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func).rpartition(".")[2] in {"size", "Symbol", "Float", "Pow", "Max"}
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            assert key == "guards_code"
        else:
            assert isinstance(node, harmless)


@pytest.mark.parametrize(
    "text", ["a" + ".a" * 5000, "-" * 15000 + "1", "1+" * 9000 + "1", "f(" * 3000, "a[0]" + "[0]" * 4000]
)
def test_deep_expressions_are_refused_or_read(text: str) -> None:
    for key in ("expr_str", "guards_code"):
        with suppress(ImportModelError):
            program_safety.check_program(json.dumps({key: text}).encode(), "model.json")


OPERATORS = [
    "torch.os.system",
    "torch.hub.load",
    "torch.load",
    "torch.ops.load_library",
    "torch.ops.aten.__class__.__init__",
    "torch.ops.aten.__init__",
    "torch.ops.image.write_file.default",
    "aten.add.Tensor",
    "torch.ops.aten.add.__globals__",
    "torch.ops.aten.add.Tensor.x",
    "torch.ops.__dict__.aten.add",
    "torch._sym_.os",
    "_operator.methodcaller",
    "_operator.call",
    "_operator.attrgetter",
    "math.__loader__",
    "#custom:op",
    "torchvision.ops.x",
]


@pytest.mark.parametrize("target", OPERATORS)
@pytest.mark.parametrize("key", ["target", "as_operator"])
def test_hostile_operator(target: str, key: str, tmp_path: Path) -> None:
    def edit(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][0][key] = target

    message = refused(with_program(edit), tmp_path)
    assert f"has the operator {target!r}: it is none of torch.ops" in message


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("torch.ops.aten.save.default", "it opens a file that the program names"),
        ("torch.ops.aten.from_file.default", "it opens a file that the program names"),
        ("torch.ops.aten.from_file.out", "it opens a file that the program names"),
        ("torch.ops.higher_order.print", "it is no control flow that fmtprop knows"),
        ("torch.ops.higher_order.call_torchbind", "it is no control flow that fmtprop knows"),
    ],
)
def test_operator_with_side_effects(target: str, expected: str, tmp_path: Path) -> None:
    def edit(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][0]["target"] = target

    assert f"has the operator {target!r}: {expected}" in refused(with_program(edit), tmp_path)


def test_no_other_operator_opens_files() -> None:
    """New versions of PyTorch may add one."""
    opens = {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(("aten::", "prims::", "torchvision::"))
        and any("file" in argument.name or argument.name in ("path_name", "url") for argument in schema.arguments)
    }
    assert opens == program_safety._FILE_OPS


def test_every_field_of_strings_is_known() -> None:
    """New versions of PyTorch may add one; programs that use it would be refused."""
    from torch._export.serde import schema

    known = {*program_safety._STRINGS, *program_safety._TABLES}
    beyond_programs = ("PayloadMeta", "PayloadConfig", "AOTInductorModelPickleData")
    for name, kind in vars(schema).items():
        for field, annotation in getattr(kind, "__annotations__", {}).items():
            if name not in beyond_programs and field != "_type" and "str" in str(annotation.__args__[0]):
                assert field in known, (name, field)


GUARDS = {
    "__import__('os').system('id')": "is not part of a comparison of sizes",
    "L['x'].__class__ == 1": "is not part of a comparison of sizes",
    "L['x\\'); import os'] == 1": "is not part of a comparison of sizes",
    "L['x'].size(exec('y')) == 1": "is not part of a comparison of sizes",
    "L[f()] == 1": "is not part of a comparison of sizes",
    "torch.load(1) == 1": "is not part of a comparison of sizes",
    "torch.sym_max(exec('y'), 1) == 1": "is not part of a comparison of sizes",
    "x == 1": "is not part of a comparison of sizes",
    "2 ** 99 > 1": "is not part of a comparison of sizes",
    "import os": "is not an expression",
}


@pytest.mark.parametrize("text", GUARDS)
def test_hostile_guard(text: str, tmp_path: Path) -> None:
    message = refused(with_program(lambda program: program["guards_code"].append(text)), tmp_path)
    assert "has the guard" in message and GUARDS[text] in message


def test_guard_that_is_no_string(tmp_path: Path) -> None:
    message = refused(with_program(lambda program: program["guards_code"].append({"a": 1})), tmp_path)
    assert "has the guard {'a': 1}: it is not a string" in message


FACTORY = {"default_factory_module": "os", "default_factory_name": "system", "dict_context": []}
LEAF = {"type": None, "context": None, "children_spec": []}
SPECS = {
    "enum": (
        {"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "antigravity:A", "name": "B"}]'},
        "it names a module to import for an enum",
    ),
    "factory module": ({"type": "collections.defaultdict", "context": FACTORY}, "names the module 'os' to import"),
    "factory": (
        {"type": "collections.defaultdict", "context": {**FACTORY, "default_factory_module": "builtins"}},
        "it names the function 'system'",
    ),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("key", ["in_spec", "out_spec"])
def test_hostile_input_description(name: str, key: str, tmp_path: Path) -> None:
    spec, expected = SPECS[name]

    def edit(program: Any) -> None:
        text = json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [{**LEAF, **spec}]}])
        program["graph_module"]["module_call_graph"][0]["signature"][key] = text

    assert expected in refused(with_program(edit), tmp_path)


def test_input_description_of_another_form(tmp_path: Path) -> None:
    def edit(spec: Any) -> Callable[[Any], None]:
        return lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(in_spec=spec)

    assert "has the input description 7: it is not a string" in refused(with_program(edit(7)), tmp_path)
    assert "is not valid JSON" in refused(with_program(edit("{")), tmp_path)


def test_keyword_argument_that_is_no_name(tmp_path: Path) -> None:
    """PyTorch makes an argument of it."""
    for key in ("x=print()", "a-b", 7):
        context = json.dumps([key])

        def edit(program: Any, context: str = context) -> None:
            arguments = {"type": "builtins.tuple", "context": "null", "children_spec": []}
            keywords = {"type": "builtins.dict", "context": context, "children_spec": [LEAF]}
            spec = {"type": "builtins.tuple", "context": "null", "children_spec": [arguments, keywords]}
            program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, spec])

        assert f"has the name {key!r}: it is not a " in refused(with_program(edit), tmp_path)


def test_string_where_the_exporter_writes_none(tmp_path: Path) -> None:
    def edit(program: Any) -> None:
        program["graph_module"]["graph"]["inputs"][0] = {"as_int": "a' == print() or '"}

    assert "the exporter writes none in 'as_int'" in refused(with_program(edit), tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"[]", "is not an exported program: a JSON list"),
        (b"{", "is not valid JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
    ids=["list", "cut", "not text", "utf-16", "deep"],
)
def test_program_that_is_none(text: bytes, expected: str, tmp_path: Path) -> None:
    assert expected in refused(pack({**HONEST_MEMBERS, PROGRAM: text}), tmp_path)


def test_too_large_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_safety, "LARGEST_JSON_NBYTES", 100)
    assert "bytes; the limit is 100" in refused(HONEST_BYTES, tmp_path)


# ---------------------------------------------------------------- the zip file itself


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ImportModelError, match=r"cannot read .*absent\.pt2: No such file"):
        check_archive(tmp_path / "absent.pt2")


def test_empty_file(tmp_path: Path) -> None:
    assert "is empty; export the model again" in refused(b"", tmp_path)


@pytest.mark.parametrize("content", [b"cos\nsystem\n.", b"x" * 1000, b"PK\x05\x06" + bytes(18)])
def test_file_that_is_no_zip_file(content: bytes, tmp_path: Path) -> None:
    assert "is not a zip file, so it is not a torch.export archive" in refused(content, tmp_path)


@pytest.mark.parametrize("part", [0.001, 0.3, 0.9, 0.999])
def test_truncated_file(part: float, tmp_path: Path) -> None:
    assert "is truncated" in refused(HONEST_BYTES[: int(len(HONEST_BYTES) * part)], tmp_path)


def test_bytes_before_and_after(tmp_path: Path) -> None:
    assert "is truncated, or has bytes after its end" in refused(HONEST_BYTES + b"\0", tmp_path)
    assert "at another place than it declares" in refused(b"PK\x03\x04" + HONEST_BYTES, tmp_path)


def test_torch_save_file_renamed(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Net().state_dict(), buffer)
    message = refused(buffer.getvalue(), tmp_path)
    assert "'data.pkl' is the pickle of a torch.save file, which holds no program" in message


def test_torchscript_file_renamed(tmp_path: Path) -> None:
    content = pack({"data.pkl": b"N.", "code/__torch__.py": b"", "constants.pkl": b"N."}, root="net/")
    assert "holds no program" in refused(content, tmp_path)


def test_other_zip_files(tmp_path: Path) -> None:
    assert "its members are not in one folder" in refused(pack({"a/x": b"", "b/x": b""}, root=""), tmp_path)
    assert "no member 'archive_format' says 'pt2'" in refused(pack({"x": b""}), tmp_path)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members_cannot_swell(method: int, tmp_path: Path) -> None:
    content = pack({**HONEST_MEMBERS, "extra/bomb": bytes(10_000_000)}, compression=method)
    assert len(content) < 1_000_000
    assert f"is compressed (zip method {method})" in refused(content, tmp_path)


@pytest.mark.parametrize("name", ["../evil", "extra/../../evil", "/evil", "extra//evil", "extra/./evil", "extra/"])
def test_name_that_leads_out(name: str, tmp_path: Path) -> None:
    content = pack({**HONEST_MEMBERS, name: b"x"})
    assert "this name would lead out of the archive" in refused(content, tmp_path)


@pytest.mark.parametrize("bad", [b"extra\\evil", b"extra/\0vil", b"extra/\nvil", b"extra/\xffvil"])
def test_unprintable_name(bad: bytes, tmp_path: Path) -> None:
    content = pack({**HONEST_MEMBERS, "extra/evil": b"x"})
    assert "an unprintable name" in refused(content.replace(b"extra/evil"[: len(bad)], bad), tmp_path)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("twin", [PROGRAM, PROGRAM.upper()])
def test_two_members_of_one_name(twin: str, tmp_path: Path) -> None:
    buffer = io.BytesIO(pack(HONEST_MEMBERS))
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr(f"model/{twin}", b"{}")
    assert "has two members of one name" in refused(buffer.getvalue(), tmp_path)


def patched(content: bytes, magic: bytes, index: int, offset: int, form: str, value: int) -> bytes:
    """Change a field of the index-th zip record that begins with these bytes; -1 is the last."""
    changed = bytearray(content)
    starts = [at for at in range(len(content)) if content.startswith(magic, at)]
    struct.pack_into(form, changed, starts[index] + offset, value)
    return bytes(changed)


SMALL = pack({"archive_format": b"pt2", "extra/a": bytes(100), "extra/b": bytes(100)})
LOCAL, ENTRY, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
ZIPS = {
    "encrypted": (ENTRY, 1, 8, "<H", 1, "is encrypted or of an unknown kind (zip flags 0x0001)"),
    "two sizes": (ENTRY, 1, 24, "<L", 10**6, "is stored as it is, yet declares"),
    "offset elsewhere": (ENTRY, 1, 42, "<L", 0, "does not begin where the one before it ends"),
    "offset outside": (ENTRY, 1, 42, "<L", 10**8, "does not begin where the one before it ends"),
    "size without value": (ENTRY, 1, 24, "<L", 0xFFFFFFFF, "has no size"),
    "second disk": (ENTRY, 1, 34, "<H", 1, "in several parts"),
    "another local name": (LOCAL, 1, 30, "<B", 0x7A, "is described in two ways"),
    "another local method": (LOCAL, 1, 8, "<H", 8, "is described in two ways"),
    "another local size": (LOCAL, 1, 18, "<L", 1, "is described in two ways"),
    "longer local name": (LOCAL, 1, 26, "<H", 60000, "is truncated"),
    "fewer entries": (END, 0, 8, "<L", 0x00010001, "that are not an entry"),
    "more entries": (END, 0, 8, "<L", 0x00FF00FF, "a damaged zip directory"),
    "directory elsewhere": (END, 0, 16, "<L", 0, "at another place than it declares"),
    "longer entry": (ENTRY, 0, 32, "<H", 60000, "a damaged zip directory"),
    "not an entry": (ENTRY, 0, 0, "<L", 0, "a damaged zip directory"),
}


@pytest.mark.parametrize("name", ZIPS)
def test_zip_file_that_two_readers_read_differently(name: str, tmp_path: Path) -> None:
    *patch, expected = ZIPS[name]
    assert expected in refused(patched(SMALL, *patch), tmp_path)  # type: ignore[arg-type]


ZIP64 = {
    "directories disagree": (b"PK\x06\x06", -1, 48, "<Q", 3, "has two directories that disagree"),
    "directory elsewhere": (b"PK\x06\x07", -1, 8, "<Q", 0, "a zip64 directory at another place than it declares"),
    "several parts": (b"PK\x06\x06", -1, 16, "<L", 1, "in several parts"),
}


@pytest.mark.parametrize("name", ZIP64)
def test_zip64_directory_that_disagrees(name: str, tmp_path: Path) -> None:
    *patch, expected = ZIP64[name]
    assert expected in refused(patched(HONEST_BYTES, *patch), tmp_path)  # type: ignore[arg-type]


def test_bytes_that_belong_to_no_member(tmp_path: Path) -> None:
    at = SMALL.index(ENTRY)
    hidden = patched(SMALL[:at] + bytes(100) + SMALL[at:], END, 0, 16, "<L", at + 100)
    assert "has 100 bytes that belong to no member" in refused(hidden, tmp_path)


def test_overlapping_members_cannot_swell(tmp_path: Path) -> None:
    """Many directory entries that point to the same bytes: the other kind of zip bomb."""
    entry = SMALL.index(ENTRY, SMALL.index(ENTRY) + 1)
    first = struct.unpack_from("<L", SMALL, entry + 42)[0]
    message = refused(patched(SMALL, ENTRY, 2, 42, "<L", first), tmp_path)
    assert "does not begin where the one before it ends" in message


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, len(HONEST_BYTES) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_is_refused_or_harmless(changes: list[tuple[int, int]], tmp_path: Path) -> None:
    """Whatever bytes change, the answer is ImportModelError or none: no other exception, no crash."""
    damaged = bytearray(HONEST_BYTES)
    for at, value in changes:
        damaged[at] = value
    path = tmp_path / "damaged.pt2"
    path.write_bytes(damaged)
    try:
        check_archive(path)
    except ImportModelError as error:
        assert "damaged.pt2" in str(error)
