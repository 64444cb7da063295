"""ONNX's own test suite: what passes, and a file that lists what does not, with the reason."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import numpy as np
import onnx
import pytest

from fmtprop.frontends.onnx import limits
from fmtprop.onnx import backend
from tests.frontends.onnx import conformance

ROOT = Path(__file__).parents[3]
LISTED = Path(__file__).with_name("not_passing.txt")
#: every so many tests, the ordinary run has one
STRIDE = 40


def listed() -> dict[str, str]:
    """Return the tests that do not pass, with how they end: refused or differs, and why."""
    lines = [line for line in LISTED.read_text().splitlines() if line and not line.startswith("#")]
    found = {name: reason.strip() for name, reason in (line.split(maxsplit=1) for line in lines)}
    has_pillow = importlib.util.find_spec("PIL") is not None
    return {name: reason for name, reason in found.items() if not (has_pillow and "Pillow" in reason)}


def check(ends: dict[str, BaseException | None]) -> None:
    expected = {name: reason for name, reason in listed().items() if name in ends}
    wrong = [n for n, error in ends.items() if error is not None and not conformance.is_refusal(error)]
    refused = {name for name, error in ends.items() if conformance.is_refusal(error)}
    assert sorted(wrong) == sorted(n for n, reason in expected.items() if reason.startswith("differs"))
    assert sorted(refused) == sorted(n for n, reason in expected.items() if reason.startswith("refused"))


def test_a_part_of_the_suite():
    tests = sorted(conformance.cases(), key=conformance.name_of)
    ends = conformance.run(tests[::STRIDE])
    assert len(ends) > 40
    check(ends)


@pytest.mark.slow
def test_the_whole_suite():
    ends = conformance.run(conformance.cases())
    check(ends)
    core = conformance.core_names()
    assert core <= ends.keys()
    assert sum(ends[name] is None for name in core) >= 0.98 * len(core)


@pytest.mark.skipif(not onnx.__version__.startswith("1.23."), reason="another onnx has other tests")
def test_core_scope():
    """Of 1569 tests in core scope at least 1552 pass; no answer is wrong, but two differ by the suite's rounding."""
    core = conformance.core_names()
    failing = {name: reason.partition(":")[0] for name, reason in listed().items() if name in core}
    assert len(core) == 1569
    assert len(core) - len(failing) >= 1552
    differing = [name for name, end in failing.items() if end == "differs"]
    assert differing == ["test_dft_inverse", "test_dft_inverse_opset19"]


@pytest.mark.parametrize("name", ["test_dft_inverse", "test_dft_inverse_opset19"])
def test_results_that_differ_are_nearer_to_the_exact_ones(name):
    """numpy computes the suite's results in float32."""
    case = next(case for case in conformance.stored("node") if case.name == name)
    ((x, *rest), (wanted,)) = case.data_sets[0]
    signal = x[..., 0] if x.shape[-1] == 1 else x.astype(np.float64) @ [1, 1j]
    exact = np.fft.ifft(signal.astype(np.complex128), axis=1)
    exact = np.stack([exact.real, exact.imag], -1)
    (got,) = backend.run_model(case.model, [x, *rest], policy="propagate")
    assert np.abs(got - exact).max() <= np.abs(wanted - exact).max() > 1e-7


@pytest.mark.skipif(onnx.defs.onnx_opset_version() != limits.NEWEST_OPSET, reason="another onnx has other operators")
def test_the_table_of_operators_is_up_to_date():
    page = runpy.run_path(str(ROOT / "scripts" / "generate_onnx_table.py"))
    assert page["TARGET"].read_text(encoding="utf-8") == page["table"](), "run scripts/generate_onnx_table.py"
