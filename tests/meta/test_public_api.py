"""The public surface changes on purpose: this list and the CHANGELOG change with it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

import fmtprop

ROOT = Path(__file__).parents[2]

PUBLIC = {
    "__version__",
    # memory formats
    "DataType",
    "MemoryDesc",
    "directml",
    "pack",
    "unpack",
    "xla",
    # models
    "CompiledModel",
    "DynamicModel",
    "Graph",
    "compile",
    "explain",
    "explain_torch",
    "from_torch",
    "inspect",
    "load",
    "load_plan",
    "onnx",
    "optimize",
    "quantize",
    "tradeoff",
    "Accuracy",
    "save",
    # errors
    "DnnlError",
    "FmtpropError",
    "FormatError",
    "GraphError",
    "HandleError",
    "ImportModelError",
    "InputError",
    "LibraryError",
    "LoadError",
    "OptionError",
    "PassError",
    "PlanError",
    "ShapeError",
    "Tune",
    "UnsupportedOpError",
    "VerifyError",
}


def test_public_names_are_the_snapshot() -> None:
    names = set(fmtprop.__all__)
    assert len(fmtprop.__all__) == len(names), "a name is listed twice"
    assert names == PUBLIC, "update PUBLIC here and say it in CHANGELOG.md"


@pytest.mark.parametrize("name", sorted(fmtprop.__all__))
def test_every_public_name_can_be_used(name: str) -> None:
    assert getattr(fmtprop, name) is not None
    assert name in dir(fmtprop)


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from fmtprop import *", names)
    assert set(fmtprop.__all__) <= names.keys()


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fmtprop' has no attribute 'no_such_name'"):
        _ = fmtprop.no_such_name


def test_every_error_is_a_fmtprop_error() -> None:
    errors = [getattr(fmtprop, name) for name in fmtprop.__all__ if name.endswith("Error")]
    assert len(errors) >= 13
    assert all(issubclass(error, fmtprop.FmtpropError) for error in errors)


def test_package_is_typed_and_versioned() -> None:
    assert (ROOT / "fmtprop" / "py.typed").is_file()
    try:
        installed = metadata.version("fmtprop")
    except metadata.PackageNotFoundError:
        pytest.skip("fmtprop is not installed; `make setup` installs it")
    assert installed == fmtprop.__version__
    assert f"## {fmtprop.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
