"""What runs each op of common problems, and its time beside PyTorch's own operator.

``python -m benchmarks.bench_ops`` compiles each problem of :mod:`benchmarks.op_problems` as a network, compares its
result with PyTorch's and times both in turns: PyTorch on row-major and, where there are images, on channels-last
tensors. ``--list`` times nothing: it prints the ops that oneDNN only has reference loops for in some format, or not at
all. ``--only`` takes a regular expression; ``ONEDNN_MAX_CPU_ISA=AVX2`` shows another instruction set.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import nn

import fmtprop as fp
from benchmarks.op_problems import Problem, problems
from fmtprop import dnnl
from fmtprop.compiling.stages import normalise
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.ir.op import Category, opdef
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.formats import describe, like
from fmtprop.passes.target import Candidate
from fmtprop.targets.onednn import OneDnnTarget

__all__ = ["main"]

#: rounds in which all entrants run, and seconds that each of their turns takes
_ROUNDS, _TURN_SECONDS = 5, 2e-3

#: largest difference from PyTorch's result, relative to its largest number
_TOLERANCE = {"f32": 1e-4, "bf16": 5e-2}


class _Function(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: torch.Tensor) -> object:
        return self.function(*operands)


def made(problem: Problem) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a problem as a module, and its operands: positive numbers, as logarithms and quotients want."""
    function, shapes = problem
    module = function if isinstance(function, nn.Module) else _Function(function)
    torch.manual_seed(0)
    return module.eval(), tuple(torch.rand(shape) + 0.5 for shape in shapes)


# ---------------------------------------------------------------- implementations


def missing(name: str, problem: Problem, dtype: str, target: OneDnnTarget) -> Iterator[str]:
    """Yield a line for each node of a problem that lacks an optimized implementation in some format."""
    module, operands = made(problem)
    graph, _ = normalise(fp.from_torch(module, operands), dtype)
    computed = graph.dependents([node.name for node in graph.input_nodes])
    for node in graph.nodes():
        if node.is_boundary or node.name not in computed or opdef(node.op).category is Category.VIEW:
            continue
        if opdef(node.op).category is Category.HOST:
            yield f"{name} | {getattr(node.attrs, 'target', node.op)} | PyTorch"
            continue
        found = {
            describe(offer): next((c.impl for c in candidates if not c.is_ref), "ref" if candidates else "none")
            for offer, candidates in _implementations(target, graph, node)
        }
        if {"ref", "none"} & set(found.values()):
            steps = "+".join([node.op, *(post_op.op for post_op in node.post_ops)])
            yield f"{name} | {steps} {getattr(node.attrs, 'alg', '')} | {found}"


def _implementations(target: OneDnnTarget, graph: Graph, node: Node) -> Iterator[tuple[MemoryDesc, list[Candidate]]]:
    """Yield the candidates of a node for each format of its widest source, the others alike or row-major."""
    types = {name: graph.type_of(value) for name, value in graph.inputs(node.name).items()}
    names = [name for name in types if not name.startswith("post_op_") and not opdef(node.op).operand(name).parameter]
    widest = types[max(names, key=lambda name: types[name].size)]
    for offer in target.formats(widest.dims, widest.dtype):
        request = {name: MemoryDesc.any(type_.dims, type_.dtype) for name, type_ in types.items()}
        for name in names:
            plain = MemoryDesc(types[name].dims, types[name].dtype)
            request[name] = like(plain, offer) or plain
        for name, type_ in zip(opdef(node.op).result_names, node.results, strict=True):
            request[name] = MemoryDesc.any(type_.dims, type_.dtype)
        yield offer, list(target.candidates(node, request))


# ---------------------------------------------------------------- times


def compared(name: str, problem: Problem, dtype: str) -> str:
    """Return a row of the table: problem, what runs, microseconds of its steps, of a call, of PyTorch's two, and ratio.

    The ratio is that of the steps to the faster of PyTorch's: a call of a compiled model takes some microseconds more
    than that of an operator, once, however many steps it has.
    """
    module, operands = made(problem)
    net = fp.compile(module, operands, dtype=dtype, tune="model", confirm=False)
    ours, theirs = _first(net(*operands)), _first(module(*operands))
    error = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30))
    if not error <= _TOLERANCE[dtype]:
        raise RuntimeError(f"{name}: off by {error:.1e} of the largest number")
    entrants: dict[str, Callable[[], object]] = {"ours": lambda: net(*operands), "row": lambda: module(*operands)}
    turned = tuple(_channels_last(operand) for operand in operands)
    if any(a is not b for a, b in zip(turned, operands, strict=True)):
        entrants["last"] = lambda: module(*turned)
    seconds = _in_turns(entrants)
    best = min(value for key, value in seconds.items() if key != "ours")
    seconds["steps"] = sum(step.seconds for step in net.report().steps)
    impls = [
        node.choice.impl if node.op != "aten" else str(getattr(node.attrs, "target", ""))
        for node in net.graph.nodes()
        if node.choice is not None and node.choice.target not in ("view", "boundary")
    ]
    figures = (f"{seconds[key] * 1e6:.0f}" if key in seconds else "" for key in ("steps", "ours", "row", "last"))
    told = ", ".join(dict.fromkeys(impls)) or "views"
    return " | ".join((f"| {name}", told, *figures, f"{seconds['steps'] / best:.2f} |"))


def _in_turns(entrants: dict[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {key: [] for key in entrants}
    for turn in range(_ROUNDS + 1):
        for key, call in entrants.items():
            start, calls = perf_counter(), 0
            while perf_counter() - start < _TURN_SECONDS or calls < 2:
                call()
                calls += 1
            if turn:  # the first warms up
                times[key].append((perf_counter() - start) / calls)
    return {key: median(values) for key, values in times.items()}


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.ndim not in formats or tensor.shape[1] == 1 or tensor[0, 0].numel() == 1:
        return tensor
    return tensor.contiguous(memory_format=formats[tensor.ndim])


def _first(result: object) -> torch.Tensor:
    first = result[0] if isinstance(result, tuple | list) else result
    if not isinstance(first, torch.Tensor):
        raise RuntimeError(f"a problem must return a tensor first, not {type(first).__name__}")
    return first


# ---------------------------------------------------------------- program


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the list or the table; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--list", action="store_true", help="print what lacks an implementation, without timing")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--only", default="", help="problems whose name has a match of this regular expression")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    version = ".".join(map(str, dnnl.lib().version))
    print(f"oneDNN {version} ({dnnl.lib().isa}), torch {torch.__version__}, {options.dtype}, {options.threads} threads")
    target = OneDnnTarget()
    with torch.inference_mode():
        for name, problem in problems().items():
            if not re.search(options.only, name):
                continue
            rows = missing(name, problem, options.dtype, target) if options.list else [
                compared(name, problem, options.dtype)
            ]  # fmt: skip
            for row in rows:
                print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
