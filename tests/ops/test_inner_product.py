from __future__ import annotations

import pytest
import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops import InnerProduct
from fmtprop.ops.inner_product import INNER_PRODUCT
from tests.ops.fake_call import FakeCall, check_import


def weights(*dims):
    return torch.randn(*dims, generator=torch.Generator().manual_seed(1))


def types(src, rows, bias=None):
    found = {"src": TensorType(src), "weights": TensorType(rows)}
    return found if bias is None else {**found, "bias": TensorType(bias)}


# ---------------------------------------------------------------- shapes and reference


@pytest.mark.parametrize("src", [(3, 8), (3, 8, 5), (3, 8, 5, 2), (3, 2, 4, 5, 2)])
def test_every_rank_gives_rows(src):
    given = types(src, (7, *src[1:]), (7,))
    assert INNER_PRODUCT.infer(InnerProduct(), given)[0].dims == (3, 7)
    x, w, b = weights(*src), weights(7, *src[1:]), weights(7)
    (got,) = INNER_PRODUCT.reference(InnerProduct(), {"src": x, "weights": w, "bias": b})
    torch.testing.assert_close(got, torch.nn.functional.linear(x.reshape(3, -1), w.reshape(7, -1), b))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (types((3, 8), (7, 9)), "src axis 1 has 8 elements but weights axis 1 has 9"),
        (types((3, 8, 2), (7, 8)), "weights has 2 axes but src has 3; they must have the same number"),
        (types((8,), (7, 8)), "src has 1 axes but an inner product takes 2 to 5"),
        (types((3, 8), (7, 8), (1, 7)), "bias has dims (1, 7) but the 7 outputs need (7,)"),
    ],
)
def test_operands_that_do_not_fit_are_named(given, message):
    with pytest.raises(ShapeError) as error:
        INNER_PRODUCT.infer(InnerProduct(), given)
    assert message in str(error.value)


# ---------------------------------------------------------------- importers


@pytest.mark.parametrize("bias", [None, weights(5)])
def test_linear_on_rows_is_an_inner_product(bias):
    assert check_import("aten.linear.default", TensorType((3, 8)), weights(5, 8), bias).ops() == ["inner_product"]


@pytest.mark.parametrize("bias", [None, weights(5)])
def test_linear_on_a_batch_is_a_product_with_the_transposed_parameter(bias):
    call = check_import("aten.linear.default", TensorType((2, 3, 8)), weights(5, 8), bias)
    assert [op for op in call.ops() if op != "reshape"] == ["permute", "matmul"]


def test_linear_on_a_vector():
    call = check_import("aten.linear.default", TensorType((8,)), weights(5, 8), weights(5))
    assert "matmul" in call.ops()


def test_addmm_with_a_constant_row_is_an_inner_product():
    call = check_import("aten.addmm.default", weights(5), TensorType((3, 8)), weights(8, 5))
    assert call.ops() == ["permute", "inner_product"]


def test_addmm_of_computed_matrices_is_a_product_and_an_addition():
    call = check_import("aten.addmm.default", TensorType((3, 5)), TensorType((3, 8)), TensorType((8, 5)))
    assert call.ops() == ["matmul", "binary"]
    row = check_import("aten.addmm.default", TensorType((5,)), TensorType((3, 8)), TensorType((8, 5)))
    assert row.ops() == ["reshape", "matmul"]


def test_addmm_with_factors_is_declined():
    call = FakeCall("aten.addmm.default", weights(5), TensorType((3, 8)), weights(8, 5), alpha=2)
    assert call.run() is None
    assert call.ops() == []
