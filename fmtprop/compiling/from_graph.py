"""From an imported graph to a compiled model: the stages with what is around them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fmtprop import dnnl
from fmtprop.compiling.compilation import Compilation
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.compiling.shapes import Shapes
from fmtprop.errors import LoadError, OptionError, PlanError
from fmtprop.ir.graph import Graph
from fmtprop.layout import MemoryDesc
from fmtprop.runtime.agreement import error_of_output
from fmtprop.system import collector


def compile_graph(
    graph: Graph, options: Options, *, owned: bool = False, shapes: Shapes | None = None
) -> CompiledModel:
    """Plan an imported graph: :func:`compile` without the import.

    Raises
    ------
    GraphError, PlanError, UnsupportedOpError
        As :func:`compile`.
    """
    options = _executable(options)
    # the caller's autocast must not affect the compilation, and tensors made in inference mode work only in that mode;
    # AOTAutograd watches each operator of a function's first call, which would slow PyTorch's operators in a race
    with (
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(mode=False),
        _disable_current_modes(),
        collector.paused(),
    ):
        if dnnl.fork_guard():
            net = dnnl.after_fork(lambda: _compile_graph(graph, options, owned, shapes))
        else:
            net = _compile_graph(graph, options, owned, shapes)
    dnnl.trim_heap()  # the originals of packed weights
    return net


def _compile_graph(graph: Graph, options: Options, owned: bool, shapes: Shapes | None) -> CompiledModel:
    _check_boundary(graph, options.boundary)
    known = (shapes.forms, shapes.nearest(graph)) if shapes is not None else (None, None)
    compilation = Compilation(
        graph, options, owned=owned and options.verify != "full", shared=known[0], sibling=known[1]
    )
    compilation.run()
    if shapes is not None:
        shapes.note(compilation)
    net = CompiledModel(compilation)
    if options.verify == "full":
        _check_whole(net, graph)
    return net


def _executable(options: Options) -> Options:
    """Return the options with a target that can run here: PyTorch's own oneDNN if there is no library."""
    if options.target == "onednn":
        try:
            dnnl.load()
        except LoadError:
            warnings.warn(
                "no oneDNN library can be loaded: the model runs on the oneDNN inside PyTorch instead "
                "(target='mkldnn'), which is slower; `fmtprop doctor` says what is missing",
                RuntimeWarning,
                stacklevel=4,
            )
            return replace(options, target="mkldnn")
    return options


def _check_boundary(graph: Graph, boundary: Mapping[str, MemoryDesc]) -> None:
    types = {node.name: node.results[0] for node in graph.input_nodes}
    types |= {node.name: graph.type_of(graph.inputs(node.name)["src"]) for node in graph.output_nodes}
    for name, desc in boundary.items():
        if name not in types:
            raise OptionError(
                f"boundary names {name!r}, but the inputs and outputs of {graph.name} are {', '.join(types)}"
            )
        type_ = types[name]
        is_input = name in {node.name for node in graph.input_nodes}
        fits = (desc.dims, desc.dtype) == (type_.dims, type_.dtype) and desc.kind == "blocked"
        if not fits or not (desc.is_plain or is_input):
            extra = "" if is_input else ", and strides without blocks"
            raise OptionError(
                f"boundary[{name!r}] is {desc}, but {name} is {type_}: it needs these dims and data type{extra}"
            )
        if desc.has_broadcast:
            raise OptionError(
                f"boundary[{name!r}] is {desc}, of which several elements lie in one place: give each its own; a call "
                "takes tensors of any strides"
            )
        if desc.is_plain and desc.offset0:
            raise OptionError(
                f"boundary[{name!r}] is {desc}, which begins {desc.offset0} elements before the tensor's first: a "
                "tensor is given by its own first element; use the same with at_start()"
            )


def _check_whole(net: CompiledModel, graph: Graph) -> None:
    from fmtprop.ops.evaluate import evaluate
    from fmtprop.report.comparison import outputs_of

    inputs = net.random_inputs()
    expected = evaluate(graph, {node.name: x for node, x in zip(graph.input_nodes, inputs, strict=True)})
    tolerance = outputs_of(graph).tolerances[net.precision]
    for (name, _), got, want in zip(net.plan.outputs, net.run_flat(inputs), expected, strict=True):
        error = error_of_output(got, want, net.precision)
        if error > tolerance:
            raise PlanError(
                f"model {graph.name}: output {name} is off by {error:.1e} relative to PyTorch (tolerance "
                f"{tolerance:.0e}); report it with the model, and compile with policy='plain' meanwhile"
            )
