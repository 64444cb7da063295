"""Bad arguments and models: one line that says what is wrong, and exit code 2, before any work is done."""

from __future__ import annotations

import json
import os
import pickle
import zipfile

import pytest

from fmtprop.bench import policies
from tests.cli.command import fmtprop


@pytest.fixture
def refused(capsys, monkeypatch):
    def compiled(*_: object) -> None:
        raise AssertionError("compiled although the arguments are bad")

    def run(*words: object) -> str:
        monkeypatch.setattr(policies, "compile_graph", compiled)
        code, out, err = fmtprop(capsys, *words)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1
        return err

    return run


@pytest.mark.parametrize("command", [["run"], ["report"], ["show"], ["bench"]])
def test_unknown_model(refused, command):
    assert "no built-in graph is named 'resnet5'; did you mean resnet50?" in refused(*command, "resnet5")


def test_missing_file(refused, tmp_path):
    assert "gone.json does not exist; give a file that does" in refused("run", tmp_path / "gone.json")


def test_directory(refused, tmp_path):
    assert f"{tmp_path}/models.pt2 cannot be read: it is a directory, not a file; give a file that can" in refused(
        "run", _directory(tmp_path / "models.pt2")
    )


def _directory(path):
    path.mkdir()
    return path


@pytest.mark.parametrize("name", ["empty.json", "empty.pt2"])
def test_empty_file(refused, tmp_path, name):
    (tmp_path / name).touch()
    assert f"{name} is empty" in refused("run", tmp_path / name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.txt", "unknown kind of file '.txt'; known: .json"),
        ("model.onnx", "model.onnx is no ONNX model, or is damaged"),
        ("model.pth", "holds weights (or a pickle), not a program"),
        ("model.py", "model.py is a program: name a function in it that returns a module, as "),
        ("model.fmtplan", "model.fmtplan is no plan file, is damaged, or is for run, report, bench and plan show, "),
    ],
)
def test_wrong_extension(refused, tmp_path, name, message):
    (tmp_path / name).write_bytes(b"x")
    assert message in refused("run", tmp_path / name)


def test_damaged_graph_file(refused, tmp_path):
    (tmp_path / "net.json").write_text('{"format": ')
    assert "net.json: line 1, column 12: is not JSON" in refused("show", tmp_path / "net.json")


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def test_hostile_archive_is_refused_unopened(refused, tmp_path):
    path, mark = tmp_path / "evil.pt2", tmp_path / "executed"
    inputs = tmp_path / "inputs.pt"
    with zipfile.ZipFile(inputs, "w") as archive:
        archive.writestr("inputs/data.pkl", pickle.dumps(Evil(f"touch {mark}")))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("evil/archive_format", "pt2")
        archive.writestr("evil/data/sample_inputs/model.pt", inputs.read_bytes())
        archive.writestr("evil/models/model.json", json.dumps({}))
    message = refused("run", path)
    assert "evil.pt2: member 'data/sample_inputs/model.pt'" in message and "system" in message
    assert not mark.exists()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "--policy",
            "fast",
            "The 'policy' parameter of compile must be one of 'optimal', 'propagate', 'naive', 'plain'. Got 'fast'",
        ),
        ("--dtype", "f64", "The 'dtype' parameter of compile must be one of 'f32', 'bf16', 'f16'. Got 'f64' instead."),
        (
            "--dtype",
            "int8",
            "The 'dtype' parameter of compile must be one of 'f32', 'bf16', 'f16'. Got 'int8' instead.",
        ),
        ("--verify", "maybe", "The 'verify' parameter of compile must be one of 'off', 'on', 'full'."),
        ("--special-values", "nan", "The 'special_values' parameter of compile must be one of 'fast', 'kept'"),
    ],
)
def test_unknown_option_value(refused, option, value, message):
    assert message in refused("run", "chain", option, value)


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [("--format", "svg", "text, dot, json"), ("--stage", "last", "imported, normal, formatted")],
)
def test_unknown_form_or_stage(refused, option, value, known):
    assert refused("show", "chain", option, value) == f"error: {option} must be one of {known}; got {value!r}\n"


@pytest.mark.parametrize("name", ["graph.png", "graph"])
def test_a_picture_of_another_kind(refused, name):
    ending = name.removeprefix("graph")
    message = f"error: {name}: a graph is saved as .svg, .onnx, .json, not as {ending!r}\n"
    assert refused("show", "chain", "-o", name) == message


@pytest.mark.parametrize("command", ["show", "bench"])
def test_unknown_policy_elsewhere(refused, command):
    assert "must be one of 'optimal', 'propagate', 'naive', 'plain'" in refused(command, "chain", "--policy", "fast")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "chain", "-p", "plain,plain"], "policy 'plain' is given twice"),
        (["report", "chain", "-p", "naive", "-p", "plain,naive"], "policy 'naive' is given twice"),
        (["bench", "chain", "--vs", "torch,torch"], "peer 'torch' is given twice"),
    ],
)
def test_given_twice(refused, words, message):
    assert refused(*words) == f"error: {message}\n"


@pytest.mark.parametrize("command", [["report", "chain", "-o"], ["run", "chain", "--report"], ["bench", "chain", "-r"]])
def test_report_that_cannot_be_written(refused, tmp_path, command, monkeypatch):
    missing = tmp_path / "gone" / "report.json"
    assert f"the directory {missing.parent} does not exist; create it first" in refused(*command, missing)
    assert "report.pdf: unknown kind of report '.pdf'; known: .txt, .json" in refused(*command, tmp_path / "report.pdf")
    folder = _directory(tmp_path / "folder.json")
    assert f"{folder} cannot be written: it is a directory, not a file" in refused(*command, folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may write everywhere
    assert "report.txt cannot be written: no permission" in refused(*command, tmp_path / "report.txt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "Missing argument 'MODEL'"),
        (["run", "chain", "--polcy", "plain"], "No such option: --polcy"),
        (["run", "chain", "--threads", "0"], "'--threads'"),
        (["run", "chain", "--threads", "100000"], "'--threads'"),
        (["run", "chain", "--repeats", "many"], "'--repeats'"),
        (["run", "chain", "--policies", ","], "',' has no name in it"),
        (["run", ""], "the name is empty; `fmtprop models` lists the built-in graphs"),
        (["show", ""], "the name is empty"),
        (["fly"], "No such command 'fly'"),
    ],
)
def test_usage(capsys, words, message):
    """The words are typer's and differ between its versions; what they are about does not."""
    code, out, err = fmtprop(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err and "Usage: fmtprop" in err
