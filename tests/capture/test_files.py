from __future__ import annotations

import io
import logging
import os
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._export.verifier import SpecViolationError

import fmtprop
from fmtprop import builtin
from fmtprop.capture import from_torch, load, save
from fmtprop.errors import GraphError, ImportModelError
from fmtprop.ir import Graph, TensorType
from tests.archive.archives import save as save_archive
from tests.capture.checking import compare, run


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()


X = torch.randn(1, 3, 8, 8)


def test_graph_file_round_trip(net, tmp_path):
    path = tmp_path / "net.json"
    save(from_torch(net, X, name="net"), path)
    graph = load(path)
    assert graph.name == "net"
    compare(run(load(str(path)), X), net(X).detach())
    compare(run(graph, X), net(X).detach())


def test_exported_program_from_a_file(net, tmp_path):
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (X,)), path)
    compare(run(load(path), X), net(X).detach())


def test_an_extension_in_capitals_is_read_without_a_word(net, tmp_path, caplog):
    path = tmp_path / "net.PT2"
    path.write_bytes(save_archive(torch.export.export(net, (X,))))
    compare(run(load(path), X), net(X).detach())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_builtin_graph_by_name(net, tmp_path, monkeypatch):
    save(from_torch(net, X, name="tiny"), tmp_path / "tiny.json")
    monkeypatch.setattr(builtin, "FOLDERS", (tmp_path,))
    assert load("tiny").name == "tiny"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text("a file of that name does not hide the graph")
    assert load("tiny").name == "tiny"
    with pytest.raises(ImportModelError, match=r"no built-in graph is named 'tinny'; did you mean tiny\?.*\.json"):
        load("tinny")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "missing.json does not exist"),
        ("dir/missing", None, "does not exist"),
        ("empty.pt2", b"", "empty.pt2 is empty"),
        ("empty.json", b"", "empty.json is empty"),
        ("model.onnx", b"x", "model.onnx is no ONNX model, or is damaged"),
        ("model.pth", b"x", r"holds weights \(or a pickle\), not a program"),
        ("model.safetensors", b"x", "holds weights"),
        ("model.py", b"x", r"model\.py is a program: name a function in it .* as .*model\.py:function$"),
        (
            "model.fmtplan",
            b"x",
            "is no plan file, is damaged, or is for run, report, bench and plan show, which take plans; `fmtprop ",
        ),
        ("model.txt", b"x", "unknown kind of file '.txt'; known: .json"),
        ("model", b"x", "unknown kind of file ''"),
        ("model.pt2", b"not a zip", "is not a .pt2 archive"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ImportModelError, match=message):
        load(path)


@pytest.mark.parametrize("path", [None, 5])
def test_a_path_is_text_or_a_path(path):
    with pytest.raises(ImportModelError, match=r"a path must be a str or a pathlib\.Path, got "):
        load(path)
    with pytest.raises(ImportModelError, match=r"a path must be a str or a pathlib\.Path, got "):
        save(Graph("empty"), path)


def test_a_name_that_is_too_long():
    with pytest.raises(ImportModelError, match=r"n\.json cannot be read: .*; give a file that can: "):
        load(f"{300 * 'n'}.json")


def test_a_directory_is_no_model(tmp_path):
    with pytest.raises(ImportModelError, match=r"it is a directory, not a file; give a file that can: \.json"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", [".json", ".pt2", ".PT2"])
def test_what_stands_in_a_file_s_place_is_called_so(tmp_path, suffix):
    places = {"a fifo": "fifo", "a device": "endless", "a link to nothing": "link"}
    os.mkfifo(tmp_path / f"fifo{suffix}")
    (tmp_path / f"endless{suffix}").symlink_to("/dev/zero")
    (tmp_path / f"link{suffix}").symlink_to("nowhere")
    for words, name in places.items():
        with pytest.raises(ImportModelError, match=rf"{name}{suffix} cannot be read: it is {words}"):
            load(tmp_path / f"{name}{suffix}")


@pytest.mark.parametrize("path", ["", "a\0.json", "\ud800.json", "a\0"])
def test_a_path_that_no_file_can_have(path):
    for use in (load, lambda path: save(Graph("empty"), path)):
        with pytest.raises(ImportModelError, match=r"a path must name a file, got "):
            use(path)


def test_pytorch_s_log_does_not_precede_our_error(tmp_path, capfd):
    old, new, message = b"aten.relu.default", b"aten.rely.default", r"cannot load this archive: .*aten\.rely\.default"

    class Net(torch.nn.Module):
        def forward(self, x):
            return (x @ x.T).relu()

    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(Net(), (torch.ones(2, 3),)), path)
    with zipfile.ZipFile(path) as archive:
        members = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in members.items():
            program = data.replace(b": ", b":").replace(old, new)
            assert not info.filename.endswith("model.json") or old in data.replace(b": ", b":")
            archive.writestr(info, program if info.filename.endswith("model.json") else data)
    capfd.readouterr()
    with pytest.raises(ImportModelError, match=message):
        load(path)
    assert capfd.readouterr() == ("", "")


def test_pytorch_s_log_is_shown_where_nothing_is_wrong(monkeypatch):
    from fmtprop.capture.torch_log import held_back

    shown = io.StringIO()
    logger = logging.getLogger("torch.export")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(shown)])
    with held_back():
        logger.warning("look out")
        assert shown.getvalue() == ""
    assert shown.getvalue() == "look out\n"


def test_a_malformed_graph_file_is_named(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(GraphError, match=r"bad\.json: line 1"):
        load(path)


def test_a_pt2_that_would_run_code_is_not_opened(net, tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (X,)), path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    import pickle

    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data if "sample_inputs" not in name else pickle.dumps(Evil()))
    monkeypatch.setattr(torch.export, "load", lambda *args, **kwargs: pytest.fail("torch opened the archive"))
    with pytest.raises(ImportModelError):
        load(path)


@pytest.mark.parametrize("error", [RuntimeError, IndexError, SpecViolationError])
def test_a_damaged_archive_is_an_import_error(net, tmp_path, monkeypatch, error):
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (X,)), path)

    def fail(file):
        raise error("schema version 99 is not supported\nmore")

    monkeypatch.setattr(torch.export, "load", fail)
    with pytest.raises(ImportModelError, match=r"cannot load this archive: schema version 99 is not supported\."):
        load(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.pt2", r"graphs are saved as \.json or \.onnx, not '\.pt2'"),
        ("net", r"saved as \.json or \.onnx, not 'without extension'"),
        ("no/net.json", "the directory .* does not exist; create it first"),
    ],
)
def test_save_names_what_is_wrong(net, tmp_path, name, message):
    with pytest.raises(ImportModelError, match=message):
        save(from_torch(net, X), tmp_path / name)


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        ("net.json", r"net\.json cannot be written: it is a directory, not a file"),
        ("net.safetensors", r"net\.json cannot be written: "),
    ],
)
def test_save_refuses_a_directory_and_leaves_nothing_behind(tmp_path, taken, message):
    (tmp_path / taken).mkdir()
    with pytest.raises(ImportModelError, match=message):
        save(from_torch(nn.Linear(80, 8), torch.ones(1, 80)), tmp_path / "net.json")
    assert [path.name for path in tmp_path.iterdir()] == [taken]


@pytest.mark.parametrize(
    ("place", "features"),
    [(place, features) for place in ("/proc/net.json", f"{{}}/{255 * 'n'}.json") for features in (2, 80)]
    + [(f"{{}}/{246 * 'n'}.json", 80)],
)
def test_save_says_why_a_file_cannot_be_written(tmp_path, place, features):
    # small weights stand in the graph file, large ones beside it: another call fails
    graph = from_torch(nn.Linear(features, 8), torch.ones(1, features))
    with pytest.raises(ImportModelError, match=r"\.json cannot be written: .*; save it to"):
        save(graph, place.format(tmp_path))
    assert not list(tmp_path.iterdir())


def test_save_removes_what_it_had_begun(net, tmp_path, monkeypatch):
    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ImportModelError, match=r"net\.json cannot be written: No space left on device"):
        save(from_torch(net, X), tmp_path / "net.json")
    assert not list(tmp_path.iterdir())


def test_only_graphs_are_saved(net, tmp_path):
    for model in (net, None, fmtprop.compile(net, X)):
        with pytest.raises(ImportModelError, match=rf"only a Graph can be saved, got {type(model).__name__}; .*torch"):
            save(model, tmp_path / "net.json")


@pytest.fixture
def models(net, tmp_path):
    graph = from_torch(net, X)
    save(graph, tmp_path / "net.json")
    torch.export.save(torch.export.export(net, (X,)), tmp_path / "net.pt2")
    return graph, tmp_path / "net.json", str(tmp_path / "net.pt2")


@pytest.mark.parametrize("which", range(3), ids=["graph", "json", "pt2"])
@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (
            torch.ones(1, 3, 9, 9),
            r"input input: .* imported for torch.float32 \(1, 3, 8, 8\), .*float32 \(1, 3, 9, 9\);",
        ),
        ((X.double(),), r"imported for torch.float32 \(1, 3, 8, 8\), the example is torch.float64 \(1, 3, 8, 8\);"),
        ((X, X), "example_inputs do not fit .*: got 2 positional arguments"),
        ((), "example_inputs do not fit .*: argument 'input' is missing"),
        ("x", "the example is a str; import the model again"),
        (torch.nested.nested_tensor([X], layout=torch.jagged), "the example is a NestedTensor"),
    ],
    ids=["shape", "type", "two", "none", "text", "nested"],
)
def test_example_inputs_must_be_those_of_a_graph_or_file(models, which, examples, message):
    with pytest.raises(ImportModelError, match=message):
        fmtprop.compile(models[which], examples)


def test_example_inputs_of_a_graph_without_structure_are_counted():
    graph = Graph("plain")
    graph.output(graph.input("x", TensorType((1, 8))))
    with pytest.raises(ImportModelError, match=r"plain takes 1 input \(x\), example_inputs has 2; leave it out"):
        fmtprop.compile(graph, (torch.ones(1, 8), torch.ones(1, 8)))


def test_example_inputs_that_fit_are_welcome(net, models):
    for model in models:
        compare(fmtprop.compile(model, (X,), policy="plain", verify="off")(X), net(X).detach())
