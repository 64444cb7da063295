from __future__ import annotations

import pytest
import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ops import Prelu, emit
from fmtprop.ops.prelu import PRELU
from tests.ops.fake_call import FakeCall, check_import

X = TensorType((2, 6, 4, 5))


@pytest.mark.parametrize(
    ("args", "ops"),
    [
        ((X, TensorType((6,))), ["reshape", "prelu"]),
        ((X, TensorType((1,))), ["reshape", "prelu"]),
        ((TensorType((2, 6)), TensorType((6,))), ["reshape", "prelu"]),
        ((TensorType((5,)), TensorType((1,))), ["prelu"]),
        ((X.with_dtype("bf16"), TensorType((6,), "bf16")), ["reshape", "prelu"]),
    ],
)
def test_importer_agrees_with_torch(args, ops):
    assert check_import("aten.prelu.default", *args).ops() == ops


def test_kernel_form_has_aligned_weights():
    assert check_import("aten._prelu_kernel.default", X, TensorType((1, 6, 1, 1))).ops() == ["prelu"]


def test_f64_is_declined():
    assert FakeCall("aten.prelu.default", X.with_dtype("f64"), TensorType((6,), "f64")).run() is None


def test_reference_matches_torch_on_nan_and_zero():
    x = torch.tensor([[-2.0, 0.0, 3.0, torch.nan]])
    (dst,) = PRELU.reference(Prelu(), {"src": x, "weights": torch.full((1, 1), 0.25)})
    torch.testing.assert_close(dst, torch.nn.functional.prelu(x, torch.tensor([0.25])), equal_nan=True)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1, 5, 1, 1), "src axis 1 has size 6 but weights axis 1 has 5; it must be that or 1"),
        ((6,), "src has 4 dimensions but weights 1; give weights dimensions of size 1"),
    ],
)
def test_errors(weights, message):
    graph = Graph()
    inputs = {"src": graph.input("x", X), "weights": graph.input("w", TensorType(weights))}
    with pytest.raises(ShapeError, match=message):
        emit(graph, "prelu", inputs, Prelu())
