"""From an imported graph to a compiled model: the stages with what is around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from fmtprop import dnnl
from fmtprop.compiling.compilation import Compilation
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.compiling.planned import Planned
from fmtprop.compiling.readable import graph_inside
from fmtprop.compiling.remembered import Remembered
from fmtprop.compiling.shapes import Shapes
from fmtprop.errors import LoadError, OptionError, PlanError
from fmtprop.ir.graph import Graph
from fmtprop.layout import MemoryDesc
from fmtprop.ops.pytorch import without_modes
from fmtprop.runtime.agreement import error_of_output
from fmtprop.system import collector

#: policy of a plan that is made quickly: it asks a target about one or two ways to run a node
QUICK = "propagate"


def compile_graph(
    graph: Graph, options: Options, *, owned: bool = False, shapes: Shapes | None = None
) -> CompiledModel:
    """Plan an imported graph: :func:`compile` without the import."""
    options = _executable(options)
    # the caller's autocast must not affect the compilation, and tensors made in inference mode work only in that mode;
    # AOTAutograd watches each operator of a function's first call, which would slow PyTorch's operators in a race
    with (
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(mode=False),
        without_modes(),
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
    forms, alike, fused = (None, None, None) if shapes is None else (shapes.forms, shapes.alike, shapes.fused)
    idle = frozenset() if shapes is None else shapes.idle(graph)
    sibling, is_similar = (None, True) if shapes is None else shapes.nearest(graph)
    if not is_similar and options.replan == "now":
        sibling = None
    full = replace(options, tune=options.tuning)
    earlier = Remembered(graph, full) if sibling is None else None
    is_quick = options.is_lazy and earlier is not None and earlier.plan is None
    first = replace(options, policy=QUICK, tune="model", confirm=False) if is_quick else options
    if earlier is not None:
        sibling, is_similar = earlier.plan, True
    is_owned = owned and options.verify != "full"
    compilation = Compilation(
        graph, first, owned=is_owned, shared=forms, sibling=sibling, alike=alike, fused=fused, idle=idle
    )
    compilation.run()
    if earlier is not None and not is_quick:
        earlier.settle(compilation)
    if shapes is not None and not is_quick:
        shapes.note(compilation, is_first=earlier is not None)
    net = CompiledModel(compilation, None if shapes is None else shapes.arenas)
    is_makeshift = compilation.is_like_another_shape and not is_similar and options.replan == "background"
    if is_quick or is_makeshift:
        full = replace(full, confirm=options.confirm and is_quick, progress=None)
        net.improve(partial(_better, compilation, full, shapes, earlier))
    if options.verify == "full":
        _check_whole(net, graph)
    return net


def _better(
    present: Planned,
    options: Options,
    shapes: Shapes | None,
    earlier: Remembered | None,
    stage: Callable[[str], None],
) -> Planned:
    """Return the compilation with choices of its own of a model that has a plan: that plan has its numbers."""
    graph = graph_inside(present.formatted, present.weights)
    options = replace(options, stage=stage, replan="now", keep_float=())  # its roundings are gone already
    made = compile_graph(graph, options, owned=True, shapes=shapes).compilation
    if earlier is not None and isinstance(made, Compilation):
        earlier.settle(made)  # as the choices of the graph that was given
    return made


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
