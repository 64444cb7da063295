"""`fmtprop run` and `fmtprop report`: what they print, write and answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fmtprop import dnnl
from fmtprop.bench import policies
from fmtprop.capture import load, save
from tests.cli.command import fmtprop

GREEDY = ["plain", "naive", "propagate"]


def test_run_checks_and_summarises(capsys):
    code, out, err = fmtprop(capsys, "run", "chain", "-n", 1)
    assert (code, err) == (0, "")
    assert "check against PyTorch: passed under each policy" in out
    assert "policy optimal: kept is the plan " in out, "the certificate"
    assert "policy optimal: primitives and formats" in out
    assert "policy optimal: reorders of every run" in out
    assert "the slowest first" not in out, "the summary is not the report"


@pytest.mark.parametrize("words", [["--policies", "plain,naive, propagate"], ["-p", "plain", "-p", "naive,propagate"]])
def test_policies_by_comma_or_repeated(capsys, words):
    code, out, _ = fmtprop(capsys, "run", "chain", "-n", 1, "--json", *words)
    assert code == 0
    assert [row["policy"] for row in json.loads(out)["policies"]] == GREEDY


@pytest.mark.parametrize("command", ["run", "report"])
def test_special_values(capsys, command):
    for values in ("fast", "exact"):
        words = ["-n", 1, "-p", "propagate", "--json", "--special-values", values]
        code, out, _ = fmtprop(capsys, command, "chain", *words)
        (policy,) = json.loads(out)["policies"]
        assert code == 0
        rows = [row for row in policy["steps"] if row["op"] == "convolution+relu"]
        exact = [row["impl"].endswith("+relu") for row in rows]  # by a kernel behind oneDNN's, which loses NaN
        assert all(exact) if values == "exact" else rows and not any(exact)


def test_json_is_all_that_stdout_has_and_the_file_has_the_report(capsys, tmp_path):
    path = tmp_path / "chain.json"
    code, out, err = fmtprop(capsys, "run", "chain", "-n", 1, "-p", "plain,propagate", "--json", "--report", path)
    assert (code, err) == (0, f"wrote {path}\n")
    assert json.loads(out) == json.loads(path.read_text())
    plain, propagate = json.loads(out)["policies"]
    assert 0 <= plain["error"] < 1e-4 > propagate["error"] >= 0
    assert plain["reorders"] == []
    assert {row["op"] for row in propagate["steps"]} >= {"convolution+relu", "pooling"}


def test_report_file_as_text_has_every_detail(capsys, tmp_path):
    path = tmp_path / "chain.TXT"
    code, out, _ = fmtprop(capsys, "run", "chain", "-n", 1, "--report", path)
    assert code == 0
    text = path.read_text()
    assert "all steps, the slowest first" in text and "compiled in: normalise" in text
    assert "the slowest first" not in out


def test_threads(capsys):
    _, out, _ = fmtprop(capsys, "run", "chain", "-n", 1, "--threads", 1, "--json")
    assert json.loads(out)["policies"][0]["machine"]["threads"] == "1"
    assert torch.get_num_threads() == 1


def test_wrong_outputs_fail_the_run_after_the_report_is_written(capsys, tmp_path, monkeypatch):
    path = tmp_path / "chain.json"
    monkeypatch.setattr(policies, "error_of_output", lambda got, want, precision: 0.25)
    code, out, err = fmtprop(capsys, "run", "chain", "-n", 1, "-p", "plain", "--report", path)
    message = "policy plain: outputs are off by 2.5e-01 relative to PyTorch (tolerance 1e-04 in f32)"
    assert code == 1
    assert err.splitlines() == [f"wrote {path}", f"error: {message}"]
    assert f"check against PyTorch FAILED: {message}" in " ".join(out.split())
    assert json.loads(path.read_text())["policies"][0]["error"] == 0.25


def test_nan_fails_the_check(capsys, monkeypatch):
    monkeypatch.setattr(policies, "error_of_output", lambda got, want, precision: float("nan"))
    code, _, err = fmtprop(capsys, "run", "chain", "-n", 1)
    assert code == 1 and "off by nan" in err


@pytest.mark.filterwarnings("default")
def test_bf16_or_a_warning(capsys):
    code, out, err = fmtprop(capsys, "run", "chain", "-n", 1, "--dtype", "bf16", "--json")
    assert code == 0
    precision = json.loads(out)["policies"][0]["precision"]
    if dnnl.supports("bf16"):
        assert (precision, err) == ("bf16", "")
    else:
        assert precision == "f32"
        assert err == (
            f"warning: target onednn has no bf16 on this CPU ({dnnl.lib().isa}): "
            "compute-intensive ops run in f32 instead\n"
        )


def test_f16_or_an_error(capsys):
    code, out, err = fmtprop(capsys, "run", "chain", "-n", 1, "--dtype", "f16", "--json")
    if dnnl.supports("f16"):
        assert (code, json.loads(out)["policies"][0]["precision"]) == (0, "f16")
    else:
        assert code == 1 and f"no f16 on this CPU ({dnnl.lib().isa}): give dtype='bf16' or dtype='f32'" in err


@pytest.mark.filterwarnings("default")
def test_warnings_are_lines(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path / "file"))
    code, _, err = fmtprop(capsys, "run", "chain", "-n", 1)
    assert code == 0
    assert err and all(line.startswith("warning: ") for line in err.splitlines())


def test_verify_full(capsys):
    assert fmtprop(capsys, "run", "residual", "-n", 1, "--verify", "full").code == 0


def test_graph_file(capsys, tmp_path):
    path = tmp_path / "mine.json"
    save(load("concat"), path)
    code, out, _ = fmtprop(capsys, "run", path, "-n", 1)
    assert code == 0
    assert "concat: policies of format assignment" in out


def test_exported_program_with_its_own_structure(capsys, tmp_path):
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, index: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"taken": x.relu()[:, index], "index": index + 1}

    path = tmp_path / "net.pt2"
    kwargs = {"index": torch.tensor([0, 1])}
    torch.export.save(torch.export.export(Net(), (torch.randn(2, 3),), kwargs), path)
    code, out, err = fmtprop(capsys, "run", path, "-n", 1, "--json")
    assert code == 0, err
    assert json.loads(out)["policies"][0]["error"] == 0.0


def test_report_compares_all_policies_in_detail(capsys):
    code, out, err = fmtprop(capsys, "report", "chain", "-n", 1)
    assert (code, err) == (0, "")
    assert "chain: policies of format assignment" in out
    for policy in [*GREEDY, "optimal"]:
        assert f"chain, policy {policy}, f32:" in out
    assert out.count("the slowest first") == 4


def test_report_into_a_file(capsys, tmp_path):
    path = tmp_path / "chain.json"
    code, out, err = fmtprop(capsys, "report", "chain", "-n", 1, "-o", path)
    assert (code, out, err) == (0, "", f"wrote {path}\n")
    assert [row["policy"] for row in json.loads(path.read_text())["policies"]] == [*GREEDY, "optimal"]


def test_a_file_that_became_unwritable_meanwhile(capsys, tmp_path, monkeypatch):
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    path = tmp_path / "chain.json"
    code, _, err = fmtprop(capsys, "report", "chain", "-n", 1, "-p", "plain", "-o", path)
    assert (code, err) == (1, f"error: {path} cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("conv_9.dst=nchw", "pin 'conv_9.dst' names no node of chain"),
        ("conv_1.dst=wcnh", "pin 'conv_1.dst' asks for f32:adbc, but no implementation"),
    ],
)
def test_a_pin_that_cannot_be_had_is_a_bad_argument(capsys, pin, message):
    code, out, err = fmtprop(capsys, "run", "chain", "--pin", pin)
    assert (code, out) == (2, "") and message in err
