"""`einsum` as matrix products: right for every kind of equation, and left to PyTorch where it is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ops.einsum import contraction

SIZES = dict(zip("bhijdkwH", (2, 3, 4, 5, 6, 7, 8, 9), strict=True))

PRODUCTS = [
    "bhid,bhjd->bhij",  # attention's scores
    "bhij,bhjd->bhid",
    "ij,jk",  # the result is implied
    "bid,jkd->bijk",  # one matrix for a batch
    "ij,bjhw->bihw",  # a convolution with a window of one
    "bjhw,jk->bkhw",
    "ijh,jhd->ihd",  # graph attention: the result is permuted
    "bhwHi,bkHi->bkhw",
    "...ij,...jk->...ik",
    "b i d, j d -> b i j",
    "...hw->...wh",
]
#: equation -> its ops, without views
SEVERAL = {
    "i,j->ij": ["binary"],
    "bhid,bhjw->bhidjw": ["binary"],
    "bhij,hj->bhij": ["binary"],
    "bhij,bhj->bhi": ["matmul"],  # a matrix and a vector
    "bij,bjk,bkw->biw": ["matmul", "matmul"],
    "bhid,bhdk,bhi->bhik": ["matmul", "binary"],  # attention without softmax, normalized
}
OTHERS = ["ii->i", "bij->bi", "bi,bi->b", "bij,bkd->bid", "bij,bij,bij->b", "ii,ij->j"]


class Einsums(nn.Module):
    def __init__(self, equations: list[str]) -> None:
        super().__init__()
        self.equations = equations

    def forward(self, *operands):
        rest = list(operands)
        return [torch.einsum(e, *(rest.pop(0) for _ in e.split("->")[0].split(","))) for e in self.equations]


def compiled(equations: list[str]):
    terms = [term for e in equations for term in e.replace(" ", "").replace("...", "bh").split("->")[0].split(",")]
    torch.manual_seed(0)
    operands = tuple(torch.randn([SIZES[axis] for axis in term]) for term in terms)
    module = Einsums(equations)
    net = fp.compile(module, operands, policy="propagate", tune="model", verify="off")
    for got, expected in zip(net(*operands), module(*operands), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    return [node.op for node in net.compilation.imported.nodes() if not node.is_boundary]


def test_products_of_two_tensors_are_matrix_products():
    ops = compiled(PRODUCTS)
    assert ops.count("matmul") == len(PRODUCTS) - 1 and "aten" not in ops


@pytest.mark.parametrize("equation", SEVERAL)
def test_several_tensors_are_multiplied_one_after_another(equation):
    views = ("reshape", "permute", "expand")
    assert [op for op in compiled([equation]) if op not in views] == SEVERAL[equation]


def test_the_order_of_products_is_the_callers():
    a, b, c = torch.randn(4, 5), torch.randn(5, 6), torch.randn(6, 7)

    class Ordered(nn.Module):
        def forward(self, a, b, c):
            return torch.ops.aten.einsum("ij,jd,dw->iw", [a, b, c], path=[1, 2, 0, 1])

    net = fp.compile(Ordered(), (a, b, c), policy="propagate", tune="model")
    torch.testing.assert_close(net(a, b, c), a @ b @ c, atol=1e-4, rtol=1e-4)
    shapes = [n.results[0].dims for n in net.compilation.imported.nodes() if n.op == "matmul"]
    assert shapes == [(5, 7), (4, 7)]


def test_others_are_pytorchs():
    assert compiled(OTHERS) == ["aten"] * len(OTHERS)


@pytest.mark.parametrize(
    ("left", "right", "result", "batch", "rows", "columns", "swapped"),
    [
        ("bhid", "bhjd", "bhij", "bh", "i", "j", False),
        ("bhid", "bhjd", "bhji", "bh", "j", "i", True),
        ("ij", "bjw", "biw", "b", "i", "w", False),  # a factor without a batch axis is broadcast
        ("bjw", "jk", "bkw", "b", "k", "w", True),
        ("btd", "edh", "bteh", "", "bt", "eh", False),
        ("ijh", "jhd", "ihd", "h", "i", "d", False),  # not without a permutation
    ],
)
def test_permutations_are_avoided(left, right, result, batch, rows, columns, swapped):
    found = contraction(left, right, result)
    assert (found.batch, found.rows, found.columns, found.swapped) == (batch, rows, columns, swapped)
