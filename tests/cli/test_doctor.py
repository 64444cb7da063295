"""`fmtprop doctor`."""

from __future__ import annotations

import json

import pytest

from fmtprop import dnnl
from fmtprop.dnnl import doctor
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
