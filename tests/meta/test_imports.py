"""Importing fmtprop is light: heavy libraries load when something needs them, not before."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Prints what an import pulled in: loaded modules, and whether oneDNN's shared library is mapped.
PROBE = """
import json, sys
import {module}
with open("/proc/self/maps") as maps:
    mapped = any("libdnnl" in line for line in maps)
print(json.dumps({{"modules": sorted(sys.modules), "dnnl": mapped}}))
"""


def loaded_by(module: str) -> tuple[set[str], bool]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.format(module=module)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    answer = json.loads(done.stdout)
    return set(answer["modules"]), answer["dnnl"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
@pytest.mark.parametrize("module", ["fmtprop", "fmtprop.errors", "fmtprop.layout"])
def test_import_loads_neither_torch_nor_onednn(module: str) -> None:
    modules, dnnl = loaded_by(module)
    assert module in modules
    assert not modules & {"torch", "onnx", "onnxruntime", "openvino", "transformers", "scipy"}
    assert not dnnl, f"importing {module} loaded the oneDNN library"


def test_package_front_imports_no_room() -> None:
    modules, _ = loaded_by("fmtprop")
    assert {name for name in modules if name.startswith("fmtprop.")} == set()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_probe_sees_what_it_looks_for() -> None:
    modules, _ = loaded_by("torch")
    assert "torch" in modules
