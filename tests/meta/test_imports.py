"""Importing fmtprop is light: heavy libraries load when something needs them, not before."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Prints what an import pulled in: loaded modules, and whether oneDNN's shared library is mapped.
PROBE = """
import json, sys
{statement}
with open("/proc/self/maps") as maps:
    mapped = any("libdnnl" in line for line in maps)
print(json.dumps({{"modules": sorted(sys.modules), "dnnl": mapped}}))
"""


def loaded_by(statement: str) -> tuple[set[str], bool]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.format(statement=statement)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    answer = json.loads(done.stdout)
    return set(answer["modules"]), answer["dnnl"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
@pytest.mark.parametrize("module", ["fmtprop", "fmtprop.errors", "fmtprop.layout"])
def test_import_loads_neither_torch_nor_onednn(module: str) -> None:
    modules, dnnl = loaded_by(f"import {module}")
    assert module in modules
    assert not modules & {"torch", "onnx", "onnxruntime", "openvino", "transformers", "scipy"}
    assert not dnnl, f"importing {module} loaded the oneDNN library"


def test_package_front_imports_no_room() -> None:
    modules, _ = loaded_by("import fmtprop")
    assert {name for name in modules if name.startswith("fmtprop.")} == set()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_probe_sees_what_it_looks_for() -> None:
    modules, dnnl = loaded_by("import fmtprop.dnnl; fmtprop.dnnl.lib()")
    assert "fmtprop.dnnl" in modules
    assert dnnl
    modules, _ = loaded_by("import fmtprop; fmtprop.compile")
    assert "torch" in modules


def test_a_graph_is_compiled_without_the_libraries_of_other_tasks() -> None:
    modules, _ = loaded_by("import fmtprop; fmtprop.compile(fmtprop.load('chain'), confirm=False)")
    assert "fmtprop.runtime" in modules
    # sympy alone would take 30 MB and a third of a second
    assert not modules & {"sympy", "torch._dynamo", "torch._inductor", "onnx", "scipy", "pydantic", "jinja2"}


def test_kernels_are_imported_without_the_assembler() -> None:
    modules, _ = loaded_by("import fmtprop.jit, fmtprop.targets")
    assert "fmtprop.jit.rows" in modules
    assert not modules & {"iced_x86", "fmtprop.jit.assembler"}, "other CPUs than x86-64 have no iced-x86"
