"""What stands on stdout: with ``--json``, JSON alone, whatever oneDNN prints there; on stderr, each warning once."""

from __future__ import annotations

import json
import logging
import warnings

import pytest

from fmtprop.cli.console import warning_printer
from tests import processes
from tests.cli.command import fmtprop, start


@pytest.mark.parametrize("name", ["ONEDNN_VERBOSE", "DNNL_VERBOSE"])
def test_json_is_alone(name, tmp_path):
    words = ("run", "chain", "-n", 1, "-p", "plain", "--json")
    done = processes.run("-m", "fmtprop", *words, **{name: "2", "FMTPROP_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0
    assert json.loads(done.stdout)
    assert "onednn_verbose" in done.stderr


def test_text_lets_onednn_speak(tmp_path):
    """So that ``ONEDNN_VERBOSE=1 fmtprop run … | grep onednn_verbose`` works as with any other program."""
    done = processes.run("-m", "fmtprop", "run", "chain", "-n", 1, "-p", "plain", ONEDNN_VERBOSE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "onednn_verbose" in done.stdout


def test_json_without_a_stderr():
    code = start("doctor", "--json", environment={"ONEDNN_VERBOSE": "1"}, stderr=None, preexec_fn=_close_stderr)
    assert json.loads(code.communicate()[0])


def _close_stderr():
    import os

    os.close(2)


def test_a_warning_is_printed_once(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warning_printer()
        for text in ("a", "b", "a"):
            warnings.warn(text, RuntimeWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: a\nwarning: b\n"


def test_what_the_package_logs_is_a_warning(capsys, monkeypatch):
    log = logging.getLogger("fmtprop.store")
    monkeypatch.setattr("fmtprop.builtin.catalogue", lambda: [log.warning("%s is not kept", "it") for _ in "ab"][:0])
    code, _, err = fmtprop(capsys, "models")
    assert (code, err) == (0, "warning: it is not kept\n")
    assert not logging.getLogger("fmtprop").handlers
