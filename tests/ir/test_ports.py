"""What the operands and results of a node are for."""

import pytest

from fmtprop.errors import GraphError
from fmtprop.ir.node import Node, PostOp, post_op_operand
from fmtprop.ir.ports import Role, port, ports, result_names, sources
from fmtprop.ir.types import TensorType
from fmtprop.ops import Binary, Conv, Eltwise, HostCall, Prelu, Sum

TYPE = TensorType((1, 8, 4, 4))


def fused(*post_ops: PostOp) -> Node:
    return Node("conv", "convolution", Conv.make(2), (TYPE,), post_ops)


def test_an_op_s_own_operands_are_sources_and_parameters_and_its_result_has_a_declared_name():
    roles = {one.name: one.role for one in ports(fused(), ("src", "weights", "bias", "dst"))}
    expected = {"src": Role.SOURCE, "weights": Role.PARAMETER, "bias": Role.PARAMETER, "dst": Role.RESULT}
    assert roles == expected


def test_what_a_post_op_reads_is_its_own_whatever_it_is_called():
    # a file may have made up the name: one of the op's own
    node = fused(PostOp("eltwise", Eltwise("relu")), PostOp("binary", Binary("add"), "bias"))
    found = port(node, "bias")
    assert (found.role, found.declared.arg, found.index) == (Role.POST_OP, "SRC_1", 1)
    assert sources(node, ("src", "weights", "bias")) == ["src"]


@pytest.mark.parametrize(
    ("post_op", "args"),
    [
        (PostOp("prelu", Prelu(), "slopes"), ["WEIGHTS"]),
        (PostOp("sum", Sum((1.0,)), "residual"), ["MULTIPLE_SRC"]),
        (PostOp("convolution", Conv.make(2), "depthwise", bias="shift"), ["WEIGHTS", "BIAS"]),
    ],
)
def test_a_post_op_s_operand_is_declared_by_its_own_op(post_op, args):
    found = ports(fused(post_op), post_op.operands)
    assert [one.declared.arg for one in found] == args
    assert all(one.post_op is post_op for one in found)


def test_inputs_of_a_variadic_operand_are_counted():
    node = Node("sum", "sum", Sum((1.0,) * 12), (TYPE,))
    assert [one.index for one in ports(node, ("src_0", "src_11"))] == [0, 11]
    for name in ("src", "src_", "src_x", "src_²", f"src_{'1' * 5000}"):
        with pytest.raises(GraphError, match="op sum has no operand"):
            port(node, name)


def test_results_are_named_by_one_rule():
    many = Node("split", "aten", HostCall("aten.split.Tensor", "{}"), (TYPE,) * 5)
    assert result_names(many) == ("dst", "dst_1", "dst_2", "dst_3", "dst_4")
    assert port(many, "dst_4").index == 4
    assert result_names(fused()) == ("dst",)
    with pytest.raises(GraphError, match="no operand 'dst_1'"):
        port(fused(), "dst_1")


def test_post_op_operands_are_named_by_one_rule():
    assert (post_op_operand(0), post_op_operand(2, "bias")) == ("post_op_0", "post_op_2_bias")
