"""Execution arguments of a primitive for the operands of a node."""

from __future__ import annotations

import torch

from fmtprop import dnnl
from fmtprop.errors import PlanError
from fmtprop.ir import Node, Port, Role, port, ports, result_names
from fmtprop.layout import MemoryDesc
from fmtprop.targets.scaling import Chain, Stored, chain_of, scaling_of, stored_of


def arguments(node: Node, pd: dnnl.PrimitiveDesc) -> list[tuple[str, int, dnnl.NativeDesc]]:
    """Return (operand or result name, argument number, native descriptor) of all arguments but the scratchpad."""
    operands = node.choice.operands if node.choice else {}
    found, chain = [], chain_of(node, stored_of(node))
    for one in ports(node, (*operands, *result_names(node))):
        number = _number(one, chain)
        if number is None:
            continue
        md = pd.arg_md(number)
        if md is None and one.post_op is not None and one.post_op.op == "prelu":  # oneDNN has no descriptor of these
            md = dnnl.NativeDesc.from_desc(operands[one.name])
        if md is None:
            raise PlanError(f"{node.label}: primitive {pd.impl} takes no argument {number} for operand {one.name}")
        found.append((one.name, number, md))
    return found


def tail_arguments(node: Node, stored: Stored) -> list[tuple[str, int]]:
    """Return (name, argument number) of each post-op's operands, except a sum's, which lies in dst's buffer."""
    chain = chain_of(node, stored)
    numbered = ((name, _number(port(node, name), chain)) for post_op in node.post_ops for name in post_op.operands)
    return [(name, number) for name, number in numbered if number is not None]


def start_of(desc: MemoryDesc, md: dnnl.NativeDesc) -> int:
    """Return the bytes between the start of a tensor's buffer and the address of a primitive's argument."""
    if desc.kind != "blocked":
        return 0
    return (desc.offset0 - md.fields.offset0) * desc.dtype.nbytes


def _number(one: Port, chain: Chain) -> int | None:
    """Return a port's argument number; None for an operand of the reference alone, and a sum's, in dst's buffer."""
    if not one.declared.arg:
        return None
    arg = dnnl.Arg[one.declared.arg]
    if one.role is Role.RESULT or one.post_op is None:
        return int(arg) + (one.index if one.declared.variadic else 0)
    if one.post_op.op == "sum":
        return None
    if one.post_op.op == "convolution":
        return int(dnnl.Arg.ATTR_POST_OP_DW | arg)
    return int(dnnl.Arg.ATTR_MULTIPLE_POST_OP(chain.position(one.index)) | arg)


def scale_arguments(node: Node) -> list[tuple[int, torch.Tensor]]:
    """Return (argument number, numbers) of the scales and zero points of a formatted node."""
    scaling = scaling_of(node, stored_of(node))
    if not scaling.scales and not scaling.zeros:
        return []
    args = {one.name: int(dnnl.Arg[one.declared.arg]) for one in ports(node, {**scaling.scales, **scaling.zeros})}
    scales = [
        (int(dnnl.Arg.ATTR_SCALES) | args[name], torch.tensor(numbers, dtype=torch.float32))
        for name, numbers in scaling.scales.items()
    ]
    zeros = [
        (int(dnnl.Arg.ATTR_ZERO_POINTS) | args[name], torch.tensor([zero], dtype=torch.int32))
        for name, zero in scaling.zeros.items()
    ]
    return scales + zeros
