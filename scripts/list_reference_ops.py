"""List what has no optimized implementation, in every format that networks have, among common problems.

``ONEDNN_MAX_CPU_ISA=AVX2 python -m scripts.list_reference_ops [--dtype bf16] [--only NAME]`` from the top of a
checkout. One line for each op of each problem that oneDNN runs by reference loops in some format, or not at all.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fmtprop import dnnl
from fmtprop.frontends import from_torch
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.ir.op import Category, opdef
from fmtprop.layout import MemoryDesc
from fmtprop.passes.formats import describe, like
from fmtprop.passes.target import Candidate
from fmtprop.stages import normalise
from fmtprop.targets.onednn import OneDnnTarget
from scripts.common_problems import Problem, problems


class _Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: torch.Tensor) -> object:
        return self.function(*operands)  # type: ignore[operator]


def normal_graph(problem: Problem, dtype: str) -> Graph:
    """Return the normal graph of a problem."""
    torch.manual_seed(0)
    function, shapes = problem
    operands = tuple(torch.rand(shape) + 0.5 for shape in shapes)
    module = function if isinstance(function, nn.Module) else _Function(function)
    return normalise(from_torch(module.eval(), operands), dtype)[0]


def implementations(target: OneDnnTarget, graph: Graph, node: Node) -> Iterator[tuple[MemoryDesc, list[Candidate]]]:
    """Yield the candidates of a node for each format of its widest source, all others alike or row-major."""
    inputs = graph.inputs(node.name)
    names = (
        [name for name in inputs if not opdef(node.op).operand(name).parameter]
        if not node.post_ops
        else [name for name in inputs if not name.startswith("post_op_") and not opdef(node.op).operand(name).parameter]
    )
    types = {name: graph.type_of(value) for name, value in inputs.items()}
    widest = max(names, key=lambda name: types[name].size)
    for offer in target.formats(types[widest].dims, types[widest].dtype):
        request = {name: MemoryDesc.any(t.dims, t.dtype) for name, t in types.items()}
        for name in names:
            plain = MemoryDesc(types[name].dims, types[name].dtype)
            request[name] = like(plain, offer) or plain
        for name, type_ in zip(opdef(node.op).result_names, node.results, strict=True):
            request[name] = MemoryDesc.any(type_.dims, type_.dtype)
        yield offer, list(target.candidates(node, request))


def lines_of(name: str, problem: Problem, dtype: str, target: OneDnnTarget) -> Iterator[str]:
    """Yield a line for each node of a problem without an optimized implementation somewhere."""
    graph = normal_graph(problem, dtype)
    varying = graph.dependents([node.name for node in graph.input_nodes])
    for node in graph.nodes():
        if node.is_boundary or node.name not in varying or node.op == "constant":
            continue
        category = opdef(node.op).category
        if category is Category.HOST:
            yield f"{name} | {getattr(node.attrs, 'target', node.op)} | host"
        elif category is not Category.VIEW:
            found = {
                describe(offer): next((c.impl for c in candidates if not c.is_ref), "ref" if candidates else "none")
                for offer, candidates in implementations(target, graph, node)
            }
            if {"ref", "none"} & set(found.values()):
                tail = "".join(f"+{post_op.op}" for post_op in node.post_ops)
                told = ", ".join(f"{tag}: {impl}" for tag, impl in found.items())
                verdict = "some" if set(found.values()) - {"ref", "none"} else "NOWHERE"
                yield f"{name} | {node.op}{tail} {getattr(node.attrs, 'alg', '')} | {verdict} | {told}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the list; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--only", default="", help="problems whose name has a match of this regular expression")
    options = parser.parse_args(None if arguments is None else list(arguments))
    warnings.simplefilter("ignore")
    target = OneDnnTarget()
    print(f"oneDNN {'.'.join(map(str, dnnl.lib().version))}, {dnnl.lib().isa}, {options.dtype}")
    for name, problem in problems().items():
        if re.search(options.only, name):
            for line in lines_of(name, problem, options.dtype, target):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
