"""ONNX's backend test suite, run by its own runner: what passes, what is refused, what is wrong."""

from __future__ import annotations

import unittest
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
from onnx import TensorProto

from fmtprop.errors import FmtpropError
from fmtprop.onnx.backend import FmtpropBackend, FmtpropRep

CORE_TYPES = {
    TensorProto.FLOAT, TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64,
    TensorProto.BOOL,
}  # fmt: skip
CONTROL_FLOW = {"If", "Loop", "Scan"}
#: kinds of tests by the runner's loader; "real" are the light models; their files come with the package
KINDS = ("node", "simple", "real", "pytorch-converted", "pytorch-operator")


class _Backend(FmtpropBackend):
    """What is asked here is whether answers are right, so no time is spent on how they are found."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> FmtpropRep:
        return super().prepare(model, device, policy="propagate", confirm=False, verify="off")


class _Result(unittest.TestResult):
    """Keeps each test's end: None, or the exception."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[str, BaseException | None] = {}

    def addSuccess(self, test: Any) -> None:
        self.ends[name_of(test)] = None

    def addError(self, test: Any, err: Any) -> None:
        self.ends[name_of(test)] = err[1]

    def addFailure(self, test: Any, err: Any) -> None:
        self.ends[name_of(test)] = err[1]


def name_of(test: Any) -> str:
    return test.id().rpartition(".")[2].removesuffix("_cpu")


def cases() -> list[Any]:
    """Return the runner's tests: ``unittest`` cases, one for each name."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # the suite's own data overflow
        runner = onnx.backend.test.BackendTest(_Backend, __name__)
    runner.exclude("cuda")
    loader = unittest.TestLoader()
    return [test for kind in runner.test_cases.values() for test in loader.loadTestsFromTestCase(kind)]


def run(tests: list[Any]) -> dict[str, BaseException | None]:
    """Run tests; return the exception that ended each, None of those that passed."""
    result = _Result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unittest.TestSuite(tests).run(result)
    return result.ends


def core_names() -> set[str]:
    """Return the names of the tests in core scope.

    All nodes are of the default domain, without control flow; inputs and outputs are tensors of the core types.
    """
    return {case.name for case in stored(*KINDS) if _is_core(_model(case))}


def stored(*kinds: str) -> list[Any]:
    """Return the suite's models of some kinds, with their inputs and results."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return [case for kind in kinds for case in load_model_tests(kind=kind)]


def _model(case: Any) -> onnx.ModelProto:
    """Return the model of a test: made, in its folder, or a light model that the runner names by an address."""
    if case.model is not None:
        return case.model
    light = Path(onnx.backend.test.__file__).parent / "data" / "light" / f"light_{case.model_name}.onnx"
    return onnx.load(Path(case.model_dir) / "model.onnx" if case.model_dir else light)


def _is_core(model: onnx.ModelProto) -> bool:
    infos = [*model.graph.input, *model.graph.output]
    types = {info.type.tensor_type.elem_type for info in infos if info.type.WhichOneof("value") == "tensor_type"}
    tensors = all(info.type.WhichOneof("value") == "tensor_type" for info in infos)
    domains = {node.domain for node in model.graph.node}
    control = any(node.op_type in CONTROL_FLOW for node in model.graph.node)
    return tensors and types <= CORE_TYPES and domains <= {"", "ai.onnx"} and not control


def is_refusal(error: BaseException | None) -> bool:
    """Whether a test ended with one of fmtprop's own errors: an answer was refused, and none given."""
    return isinstance(error, FmtpropError)


if __name__ == "__main__":
    import sys

    ends = run([test for test in cases() if len(sys.argv) < 2 or sys.argv[1] in name_of(test)])
    core = core_names()
    for name, error in ends.items():
        if error is not None:
            kind = "core " if name in core else "other"
            what = "refused" if is_refusal(error) else "WRONG"
            print(kind, what, name, " ".join(str(error).split())[:240])
    good = [name for name, error in ends.items() if error is None]
    print(len(good), "of", len(ends), "pass; of the core,", len(core & set(good)), "of", len(core & set(ends)))
