"""An output replaces a report, or nothing: never the model, its weights, or what somebody else wrote."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from fmtprop.bench import contenders, policies
from fmtprop.capture import from_torch, load, save
from tests.cli.command import fmtprop


@pytest.fixture
def model(tmp_path):
    """A graph file with weights beside it."""
    save(from_torch(torch.nn.Linear(40, 40), torch.ones(1, 40)), tmp_path / "net.json")
    return tmp_path / "net.json"


def link(path, target):
    path.symlink_to(target)
    return path


def hard_link(path, target):
    os.link(target, path)
    return path


def fifo(path):
    os.mkfifo(path)
    return path


def folder(path):
    path.mkdir()
    return path


def text(path):
    path.write_text("a letter")
    return path


OUTPUTS = {
    "the model": (lambda at, net: net, "did not come from here and is not replaced"),
    "a link to the model": (lambda at, net: link(at / "out.json", net), "is not replaced"),
    "a hard link to the model": (lambda at, net: hard_link(at / "out.txt", net), "is not replaced"),
    "a link to its weights": (lambda at, net: link(at / "o.json", net.with_suffix(".safetensors")), "is not replaced"),
    "its weights": (lambda at, net: net.with_suffix(".safetensors"), "unknown kind of report '.safetensors'"),
    "somebody's text": (lambda at, net: text(at / "letter.txt"), "is not replaced"),
    "a directory": (lambda at, net: folder(at / "out.txt"), "it is a directory, not a file"),
    "a fifo": (lambda at, net: fifo(at / "out.txt"), "it is a fifo, not a file"),
    "a full device": (lambda at, net: link(at / "out.txt", "/dev/full"), "it is a device, not a file"),
    "stdout": (lambda at, net: "/dev/stdout", "unknown kind of report ''"),
    "a missing directory": (lambda at, net: at / "gone" / "out.txt", "does not exist; create it first"),
}


@pytest.mark.parametrize("what", OUTPUTS)
@pytest.mark.parametrize("command", [("report", "-o"), ("run", "-r"), ("bench", "-r")], ids=lambda pair: pair[0])
def test_nothing_else_than_a_report_is_replaced(capsys, tmp_path, monkeypatch, model, command, what):
    for module in (policies, contenders):
        monkeypatch.setattr(module, "check_memory", None)  # nothing may begin
    make, message = OUTPUTS[what]
    output = make(tmp_path, model)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file() and not path.is_symlink()}
    name, option = command
    code, out, err = fmtprop(capsys, name, model, option, output)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
    assert all(path.read_bytes() == content for path, content in before.items())
    load(model)


def test_a_report_is_replaced(capsys, tmp_path, model):
    for name in ("out.txt", "out.json"):
        for _ in range(2):
            code, _, err = fmtprop(capsys, "run", model, "-n", 1, "-p", "plain", "-r", tmp_path / name)
            assert (code, err) == (0, f"wrote {tmp_path / name}\n")
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == stat.S_IMODE(model.stat().st_mode)
    assert (tmp_path / "out.txt").read_text().startswith("fmtprop report\n")
    code, _, err = fmtprop(capsys, "bench", model, "-n", 1, "-r", tmp_path / "out.json")
    assert (code, err) == (0, f"wrote {tmp_path / 'out.json'}\n")
    code, _, err = fmtprop(capsys, "run", model, "-n", 1, "-p", "plain", "-r", tmp_path / "out.json")
    assert (code, err) == (0, f"wrote {tmp_path / 'out.json'}\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.png", "pictures are drawn as .svg, not '.png'"), ("a", "not 'without extension'"), ("b.svg", "not replaced")],
)
def test_pictures(capsys, tmp_path, name, message):
    (tmp_path / "b.svg").write_text("<svg></svg>")
    code, out, err = fmtprop(capsys, "layout", "nChw8c", "1,8,2,2", "--svg", tmp_path / name)
    assert (code, out) == (2, "") and message in err
    assert (tmp_path / "b.svg").read_text() == "<svg></svg>"


def test_a_picture_is_replaced(capsys, tmp_path):
    for _ in range(2):
        assert fmtprop(capsys, "layout", "nChw8c", "1,8,2,2", "--svg", tmp_path / "a.svg").code == 0
