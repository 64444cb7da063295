"""Which execution argument of a primitive carries which operand of a node."""

from __future__ import annotations

from fmtprop import dnnl
from fmtprop.errors import PlanError
from fmtprop.ir.node import Node
from fmtprop.ir.op import OpDef, opdef
from fmtprop.layout import MemoryDesc


def arguments(node: Node, pd: dnnl.PrimitiveDesc) -> list[tuple[str, int, dnnl.NativeDesc]]:
    """Return (operand or result name, argument number, native descriptor) for everything but the scratchpad.

    Raises
    ------
    PlanError
        The primitive has no such argument.
    """
    declaration = opdef(node.op)
    names = [name for name in (node.choice.operands if node.choice else {}) if not name.startswith("post_op_")]
    numbered = [(name, _operand_number(declaration, name)) for name in names]
    numbered += [
        (name, int(dnnl.Arg[arg]))
        for name, arg, _ in zip(declaration.result_names, declaration.result_args, node.results, strict=False)
    ]
    numbered += tail_arguments(node)
    slopes = {name for post_op in node.post_ops if post_op.op == "prelu" for name in post_op.operands}
    found = []
    for name, number in numbered:
        md = pd.arg_md(number)
        if md is None and node.choice is not None and name in slopes:  # oneDNN keeps no descriptor of these
            md = dnnl.NativeDesc.from_desc(node.choice.operands[name])
        if md is None:
            raise PlanError(f"{node.label}: primitive {pd.impl} takes no argument {number} for operand {name}")
        found.append((name, number, md))
    return found


def tail_arguments(node: Node) -> list[tuple[str, int]]:
    """Return (name, argument number) of each post-op's operands; not of a sum's, which lies in dst's buffer."""
    numbered = []
    for index, post_op in enumerate(node.post_ops):
        if post_op.op == "convolution":
            sources = (dnnl.Arg.WEIGHTS, dnnl.Arg.BIAS)
            numbered += [
                (name, int(dnnl.Arg.ATTR_POST_OP_DW | arg))
                for name, arg in zip(post_op.operands, sources, strict=False)
            ]
        elif post_op.operand is not None and post_op.op != "sum":
            source = dnnl.Arg.WEIGHTS if post_op.op == "prelu" else dnnl.Arg.SRC_1
            numbered.append((post_op.operand, int(dnnl.Arg.ATTR_MULTIPLE_POST_OP(index) | source)))
    return numbered


def start_of(desc: MemoryDesc, md: dnnl.NativeDesc) -> int:
    """Return the bytes from the start of a tensor's buffer to where a primitive's argument points.

    Parameters
    ----------
    desc : MemoryDesc
        How the tensor lies in its buffer; a slice starts inside of it.
    md : NativeDesc
        The argument's descriptor, which counts from its own first element.
    """
    if desc.kind != "blocked":
        return 0
    return (desc.offset0 - md.fields.offset0) * desc.dtype.nbytes


def _operand_number(declaration: OpDef, name: str) -> int:
    operand = declaration.operand(name)
    number = int(dnnl.Arg[operand.arg])
    return number + int(name.rpartition("_")[2]) if operand.variadic else number
