"""`fmtprop doctor`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fmtprop import dnnl
from fmtprop.bench.contenders import libraries
from fmtprop.dnnl import doctor
from fmtprop.dnnl.locate import candidates
from fmtprop.errors import LoadError
from fmtprop.jit import no_tiles, unavailable
from tests.cli.command import fmtprop


def test_doctor(capsys):
    code, out, err = fmtprop(capsys, "doctor")
    assert (code, err) == (0, "")
    assert f"instruction set  {dnnl.lib().isa}" in out
    assert ("own kernels      yes" in out) == (not unavailable())
    assert f"AMX tiles        {f'no: {unavailable() or no_tiles()}' if unavailable() or no_tiles() else 'yes'}" in out


def test_doctor_json(capsys):
    code, out, _ = fmtprop(capsys, "doctor", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["isa"] == dnnl.lib().isa and data["data_types"]["f32"] is True
    assert data["kernels"] == (not unavailable())
    assert data["tiles"] == (not unavailable() and not no_tiles())


def test_no_library_is_code_1_and_says_what_to_install(capsys, monkeypatch):
    def absent() -> None:
        raise LoadError("no oneDNN library was found")

    monkeypatch.setattr(doctor, "load", absent)
    code, out, _ = fmtprop(capsys, "doctor")
    assert code == 1
    assert "oneDNN           not usable" in out and "pip install" in out


@pytest.mark.usefixtures("own_cache")
def test_costs_beside_times(capsys):
    code, out, _ = fmtprop(capsys, "doctor", "--costs", "residual", "--json")
    data = json.loads(out)
    assert code == 0 and data["model"] == "residual" and data["precision"] == "f32"
    assert data["seconds"] > 0 and data["cost_seconds"] > 0 and data["median"] > 0
    assert max(data["worst"], 1 / data["worst"]) >= max(data["median"], 1 / data["median"])
    code, out, _ = fmtprop(capsys, "doctor", "--costs", "residual")
    assert code == 0 and out.startswith("residual, f32: modelled costs ") and "\nthe worst " in out


def test_costs_of_no_model_are_a_wrong_use(capsys):
    code, _, err = fmtprop(capsys, "doctor", "--costs", "no-such-model")
    assert code == 2 and "no-such-model" in err


@pytest.fixture
def another_library(tmp_path, monkeypatch):
    """A second oneDNN, where one that the user built would lie."""
    copy = tmp_path / "lib" / "libdnnl.so.3"
    copy.parent.mkdir()
    shutil.copy(dnnl.lib().path, copy)
    monkeypatch.setenv("DNNLROOT", str(tmp_path))
    return copy


def test_each_installed_library_is_a_contender_the_one_in_use_first(another_library):
    found = libraries()
    assert Path(found[0].library).samefile(dnnl.lib().path)
    assert str(another_library) in {one.library for one in found}
    assert len({one.name for one in found}) == len(found)


@pytest.mark.slow
def test_libraries_are_raced(capsys, another_library):
    code, out, _ = fmtprop(capsys, "doctor", "--libraries", "residual", "--json")
    data = json.loads(out)
    assert code == 0 and len(data["entries"]) >= 2
    assert all(entry["agreement"]["passed"] and entry["latency"]["median"] > 0 for entry in data["entries"])


@pytest.mark.skipif(len([one for one in candidates() if one.usable and one.version]) > 1, reason="there are two")
def test_one_library_is_no_race(capsys):
    code, _, err = fmtprop(capsys, "doctor", "--libraries", "residual")
    assert code == 2 and "there is one oneDNN to time" in err and "pip install" in err
