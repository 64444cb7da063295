"""Names in somebody else's file: none reaches the terminal as anything but text."""

from __future__ import annotations

import json

import pytest

from fmtprop.capture import load, save
from tests.cli.command import fmtprop

NAME, SHOWN = "\x1b[31m\nrelu\x9b2J", r"\x1b[31m\nrelu\x9b2J"


@pytest.fixture
def hostile(tmp_path):
    path = tmp_path / "hostile.json"
    save(load("chain"), path)
    text = json.dumps(json.loads(path.read_text()))
    for word in ("chain", "relu_1", "pool_1"):
        text = text.replace(f'"{word}"', json.dumps(f"{NAME}_{word}"))
    path.write_text(text.replace('"origin": "pool"', f'"origin": {json.dumps(NAME)}'))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["show", "-s", "imported"],
        ["show", "-p", "propagate", "--passes"],
        ["show", "-f", "dot"],
        ["run", "-n", 1],
        ["report", "-n", 1, "-p", "plain,naive"],
        ["tune", "-b", 0.01],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("own_cache")
def test_stdout(capsys, hostile, words):
    command, *options = words
    code, out, err = fmtprop(capsys, command, hostile, *options)
    assert (code, err) == (0, "")
    assert out.replace("\n", "").isprintable()
    assert (SHOWN.replace("\\", "\\\\") if "dot" in words else SHOWN) in out


def test_stderr(capsys, hostile):
    hostile.write_text(hostile.read_text().replace('"kernel": [2, 2]', '"kernel": [2, 0]'))
    code, out, err = fmtprop(capsys, "run", hostile)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.replace("\n", "").isprintable()
    assert r"\x1b[31m" in err
