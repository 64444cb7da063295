"""Importing fmtprop is light: heavy libraries load when something needs them, not before."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Prints what an import pulled in: loaded modules, and whether oneDNN's shared library is mapped.
PROBE = """
import json, sys
STATEMENT
with open("/proc/self/maps") as maps:
    mapped = any("libdnnl" in line for line in maps)
print(json.dumps({"modules": sorted(sys.modules), "dnnl": mapped}))
"""


def loaded_by(statement: str) -> tuple[set[str], bool]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.replace("STATEMENT", statement)],
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


def test_built_in_graphs_are_listed_without_graphs_and_numpy() -> None:
    modules, _ = loaded_by("import fmtprop.builtin; assert fmtprop.builtin.catalogue()")
    assert not modules & {"numpy", "fmtprop.ir", "fmtprop.layout"}


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


#: rooms and libraries of other tasks than the inference of a graph by oneDNN; torch itself imports torch.export and .fx
OF_OTHER_TASKS = {
    "fmtprop.capture.exporting",
    "fmtprop.dynamo",
    "fmtprop.report.model",
    "fmtprop.targets.mkldnn",
    "fmtprop.training",
    "jinja2",
    "networkx",
    "pydantic",
    "rich",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.utils.flop_counter",
    "typer",
}

#: what ONNX models need that have other operators than ONNX's own, or such without a function
OF_OTHER_MODELS = {"fmtprop.onnx.model.operators.microsoft", "onnx.reference", "onnxscript"}

SESSION = """
import numpy, onnx.parser, fmtprop
model = onnx.parser.parse_model('''
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 3, 8, 8] x) => (float[1, 3, 1, 1] y) { r = Relu(x) y = GlobalAveragePool(r) }''')
fmtprop.onnx.InferenceSession(model).run(None, {"x": numpy.ones((1, 3, 8, 8), numpy.float32)})
"""


def test_a_session_imports_what_it_uses() -> None:
    modules, _ = loaded_by(SESSION)
    assert {"fmtprop.compiling.race", "fmtprop.onnx.model.operators.elementwise"} <= modules
    assert sorted(modules & (OF_OTHER_TASKS | OF_OTHER_MODELS)) == []


def test_a_module_is_compiled_without_the_libraries_of_other_tasks() -> None:
    statement = "import torch, fmtprop; fmtprop.compile(torch.nn.Linear(3, 4), torch.ones(2, 3))"
    modules, _ = loaded_by(statement)
    assert "fmtprop.capture.exporting" in modules
    assert sorted(modules & {"fmtprop.report.model", "fmtprop.targets.mkldnn", "fmtprop.training", "onnx"}) == []
