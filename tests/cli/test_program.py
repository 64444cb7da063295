"""The program around its commands: help, version, exit codes, streams."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

import fmtprop as package
from fmtprop.errors import PassError
from tests.cli.command import ROOT, fmtprop, start

COMMANDS = [
    "run",
    "report",
    "diff",
    "check",
    "whatif",
    "show",
    "models",
    "tune",
    "bench",
    "layout",
    "verbose",
    "lens",
    "doctor",
    "compile",
    "plan",
]
HEAVY = {"torch", "numpy", "networkx", "scipy", "onnxruntime", "openvino", "rich.progress"}

LOADED = """
import sys
from fmtprop.cli import main
try:
    main({words})
except SystemExit as ended:
    assert ended.code == 0, ended.code
print(*sorted(sys.modules), sep="\\n", file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
def test_help_is_light(words):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADED.format(words=words)],
        check=True, capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    modules = set(done.stderr.split())
    assert "fmtprop.cli.app" in modules
    assert not modules & HEAVY


def test_layout_needs_neither_torch_nor_onednn():
    words = ["layout", "nChw16c", "2,17,5,7"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADED.format(words=words)],
        check=True, capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert not set(done.stderr.split()) & {"torch", "networkx", "fmtprop.dnnl"}


def test_a_run_loads_nothing_of_training(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fmtprop.bench.training", None)  # which loads torch._dynamo: 1.5 s
    assert fmtprop(capsys, "run", "chain", "-n", 1, "-p", "plain").code == 0


def test_version(capsys):
    assert fmtprop(capsys, "--version") == (0, f"fmtprop {package.__version__}\n", "")


def test_help_names_every_command(capsys):
    code, out, _ = fmtprop(capsys, "--help")
    listed = out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert code == 0
    assert [line.split()[0] for line in listed] == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(capsys, command):
    code, out, err = fmtprop(capsys, command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: fmtprop {command} ")


def test_nothing_to_do_shows_the_help(capsys):
    code, out, err = fmtprop(capsys)
    assert code == 2
    assert "Commands:" in out + err


def test_error_is_one_line_and_its_traceback_on_demand(capsys):
    code, out, err = fmtprop(capsys, "layout", "nChw16c")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, _, err = fmtprop(capsys, "--traceback", "layout", "nChw16c")
    assert code == 2
    assert err.startswith("Traceback") and "read_layout" in err
    assert err.splitlines()[-1].startswith("error: 'nChw16c' needs dims")


def test_error_while_working_is_code_1(capsys, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise PassError("pass fold (the first pass): node conv_1 (convolution): wrong")

    monkeypatch.setattr("fmtprop.compiling.snapshots.snapshots", fail)
    code, out, err = fmtprop(capsys, "show", "chain")
    assert (code, out, err) == (1, "", "error: pass fold (the first pass): node conv_1 (convolution): wrong\n")


def test_a_defect_is_not_hidden(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("fmtprop.compiling.snapshots.snapshots", fail)
    from fmtprop.cli import main

    with pytest.raises(ZeroDivisionError):
        main(["show", "chain"])


def test_interrupted(capsys, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fmtprop.compiling.snapshots.snapshots", interrupt)
    code, out, err = fmtprop(capsys, "show", "chain")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_interrupted_by_a_signal():
    terminal, stderr = pty.openpty()
    process = start("run", "chain", "--repeats", 100_000, stderr=stderr)
    os.close(stderr)
    shown = ""
    while "measuring" not in shown:  # by then it is at work
        shown += os.read(terminal, 4096).decode(errors="replace")
    process.send_signal(signal.SIGINT)
    shown += _read(terminal)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in shown


def test_interrupted_before_there_is_a_program(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")  # while it is imported
    process = start("models", environment={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert (*process.communicate(timeout=60), process.returncode) == ("", "", 130)


def test_reader_that_has_gone():
    read, write = os.pipe()
    os.close(read)
    process = start("layout", "nChw16c", "2,17,5,7", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_stdout_that_is_full():
    with open("/dev/full", "w") as full:
        process = start("layout", "nChw16c", "2,17,5,7", stdout=full)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "error: cannot write to stdout: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_help_for_a_stdout_that_is_full():
    with open("/dev/full", "w") as full:
        process = start("--help", stdout=full)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "error: cannot write to stdout: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["run", "--nothing"], ["run", "nosuch"]])
def test_stderr_that_is_full_leaves_the_exit_code(words):
    with open("/dev/full", "w") as full:
        process = start(*words, stderr=full)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")


@pytest.mark.parametrize(
    "words",
    [["models"], ["--version"], ["run", "chain", "-n", "1"], ["layout", "abcd", "2,3,4,5"]],
    ids=lambda words: words[0],
)
def test_stdout_that_is_closed(words):
    done = _closing(">&-", *words)
    assert (done.returncode, done.stderr) == (1, "error: cannot write to stdout: it is closed\n")


def test_a_picture_for_a_stdout_that_is_closed(tmp_path):
    done = _closing(">&-", "layout", "abcd", "2,3,4,5", "--svg", str(tmp_path / "picture.svg"))
    assert (done.returncode, done.stderr) == (1, "error: cannot write to stdout: it is closed\n")
    assert (tmp_path / "picture.svg").exists()


def test_stderr_that_is_closed():
    done = _closing("2>&-", "run", "chain", "-n", "1")
    assert done.returncode == 0
    assert "policies of format assignment" in done.stdout
    done = _closing("2>&-", "run", "nosuch")
    assert (done.returncode, done.stdout) == (2, "")


def _closing(stream: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {stream}', "sh", sys.executable, "-m", "fmtprop", *words],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
    )  # fmt: skip


def test_terminal_without_the_characters():
    process = start("run", "chain", "-n", 1, environment={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.isascii() and "policies of format assignment" in out


def test_progress_goes_to_a_terminal_alone(capsys):
    assert fmtprop(capsys, "run", "chain", "-n", 1).err == ""
    terminal, stderr = pty.openpty()
    process = start("run", "chain", "-n", 1, "--json", stderr=stderr)
    os.close(stderr)
    shown = _read(terminal)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(out), "the bar is not on stdout"
    assert "compiling under optimal" in shown


def _read(terminal: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how Linux says that nobody holds the other end any more
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode(errors="replace")
        parts.append(part)


def test_help_lists_the_policies_and_peers_that_there_are(capsys):
    from fmtprop.bench import PEERS
    from fmtprop.passes.assignment.policies import POLICIES

    _, out, _ = fmtprop(capsys, "run", "--help")
    assert all(policy in out for policy in POLICIES)
    _, out, _ = fmtprop(capsys, "bench", "--help")
    assert all(name in "".join(out.split()) for name in PEERS), "rich breaks lines at hyphens"
