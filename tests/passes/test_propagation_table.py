"""The propagation table of the oneDNN specification (SPEC M9): the first request of `propagate`, row by row."""

from __future__ import annotations

import pytest

from fmtprop.ir.node import Node
from fmtprop.ir.op import Category, opdef
from fmtprop.ir.ports import result_names
from fmtprop.layout import MemoryDesc
from fmtprop.ops import OPS
from fmtprop.passes.assignment.policies import Question, propagate_policy

#: forward and backward ops of the rows; matmul and inner product have matrix products for their gradients, a
#: deconvolution has convolutions, a shuffle another shuffle
COMPUTE = {
    *("convolution", "convolution_backward_data", "convolution_backward_weights"),
    *("deconvolution", "inner_product", "matmul", "vanilla_rnn", "lstm", "lbr_gru"),
    *(f"{name}_{way}" for name in ("vanilla_rnn", "lstm", "lbr_gru") for way in ("training", "backward")),
}
FORWARD = {
    *("pooling", "lrn", "eltwise", "shuffle", "softmax"),
    *("batch_normalization", "batch_normalization_training", "layer_normalization", "layer_normalization_training"),
}
BACKWARD = {
    *("batch_normalization_backward", "layer_normalization_backward"),
    *("eltwise_backward", "softmax_backward", "prelu_backward"),
}
#: without a tensor of data, the gradient comes as it is
BACKWARD_ALONE = {"pooling_backward"}
SEVERAL = {"concat", "sum", "binary"}


def first_requests(name):
    """Yield each sample's operands with other axes innermost, and what `propagate` asks for first."""
    declaration = opdef(name)
    for sample in declaration.samples():
        node = Node(name, name, sample.attrs, declaration.infer(sample.attrs, sample.types))
        given = {
            operand: MemoryDesc(type_.dims, type_.dtype, tag="acdb" if type_.ndim == 4 else None)
            for operand, type_ in sample.types.items()
        }
        question = Question(node, declaration, given, lambda src, dst: 0.0 if src == dst else 1e-6)
        yield declaration, node, given, next(iter(propagate_policy(question))).request


def is_any(request, names):
    return all(request[name].kind == "any" for name in names)


@pytest.mark.parametrize("name", sorted(COMPUTE))
def test_compute_intensive_ops_ask_any(name):
    assert opdef(name).category is Category.COMPUTE
    for _, node, given, request in first_requests(name):
        vectors = {operand for operand in given if "bias" in operand and given[operand].ndim < 2}
        assert is_any(request, {*given, *result_names(node)} - vectors)


@pytest.mark.parametrize("name", sorted(FORWARD | BACKWARD_ALONE))
def test_bandwidth_limited_ops_take_their_source_as_it_comes(name):
    for declaration, node, given, request in first_requests(name):
        read = [operand for operand in given if not declaration.operand(operand).parameter]
        assert {operand: request[operand] for operand in read} == {operand: given[operand] for operand in read}
        assert is_any(request, result_names(node))


@pytest.mark.parametrize("name", sorted(BACKWARD))
def test_gradients_of_bandwidth_limited_ops_are_any_and_data_as_they_are(name):
    for declaration, node, given, request in first_requests(name):
        data = [o for o in given if o in ("src", "dst") and not declaration.operand(o).parameter]
        assert data and all(request[operand] == given[operand] for operand in data)
        assert is_any(request, ("diff_dst", *result_names(node)))


@pytest.mark.parametrize("name", sorted(SEVERAL))
def test_ops_of_several_sources_take_them_as_they_come(name):
    for _, node, given, request in first_requests(name):
        full = [operand for operand in given if given[operand].dims == node.results[0].dims]
        assert all(request[operand] == given[operand] for operand in full)
        assert is_any(request, result_names(node))


def test_every_op_of_these_rows_is_tested():
    """An op with a gradient as its operand belongs to a row with a backward column."""
    with_gradient = {op.name for op in OPS for operand in op.operands if operand.arg.startswith("DIFF_")}
    assert with_gradient <= COMPUTE | BACKWARD | BACKWARD_ALONE
