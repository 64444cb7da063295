"""The front door: compile a model.

Ties the stages together in their order (import, normalise, assign, plan, run) and decides nothing itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from fmtprop import dnnl
from fmtprop.compiling.compilation import Compilation
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.dynamic import DynamicModel
from fmtprop.compiling.options import DEFAULT_POLICY, Options
from fmtprop.compiling.stages import random_inputs
from fmtprop.errors import GraphError, ImportModelError, LoadError, PlanError, UnsupportedOpError
from fmtprop.frontends import from_torch, load
from fmtprop.frontends.examples import check_examples
from fmtprop.frontends.onnx import from_onnx, is_onnx
from fmtprop.frontends.specialise import Sizes
from fmtprop.frontends.torch_export import from_torch_symbolic
from fmtprop.ir.graph import Graph
from fmtprop.layout import MemoryDesc
from fmtprop.runtime.agreement import error_of_numbers
from fmtprop.runtime.constants import release
from fmtprop.runtime.threads import on_cpu
from fmtprop.system import collector

if TYPE_CHECKING:
    from fmtprop.training.module import TrainingModule

__all__ = ["CompiledModel", "DynamicModel", "Options", "compile", "compile_graph", "random_inputs"]


@overload
def compile(
    model: Any, example_inputs: Any = None, *options: Any, training: Literal[True], **named: Any
) -> TrainingModule: ...


@overload
def compile(
    model: Any,
    example_inputs: Any = None,
    *options: Any,
    training: Literal[False] = False,
    dynamic_shapes: None = None,
    **named: Any,
) -> CompiledModel: ...


@overload
def compile(model: Any, example_inputs: Any, *options: Any, dynamic_shapes: Any, **named: Any) -> DynamicModel: ...


def compile(  # type: ignore[misc]  # the overloads leave out what is the same in all
    model: Any,
    example_inputs: Any = None,
    dtype: str = "f32",
    policy: str = DEFAULT_POLICY,
    target: str = "onednn",
    tune: str = "auto",
    *,
    verify: str = "on",
    boundary: Mapping[str, MemoryDesc] | None = None,
    pin: Mapping[str, MemoryDesc | str] | None = None,
    tune_budget: float | None = None,
    confirm: bool = True,
    winograd: bool = True,
    special_values: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    release_weights: bool = False,
    training: bool = False,
    memory: str = "save",
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    max_shapes: int = 8,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> CompiledModel | DynamicModel | TrainingModule:
    """Plan the memory format of every tensor of a model and make it ready to run.

    The model is taken as it is now: later changes of its parameters do not reach it. Threads follow torch: formats and
    implementations are chosen for the number that is set now, and a run uses the number that is set then.
    What an enclosing ``torch.autocast`` makes of a module becomes part of it; around a call, it changes nothing. A
    module is taken in evaluation mode, whichever it is in, and results of the compiled model have no gradients.

    Parameters
    ----------
    model : torch.nn.Module, torch.export.ExportedProgram, Graph, str, path, bytes or onnx.ModelProto
        A module, an op graph, the name of a built-in graph, a file (graph ``.json``, ``.pt2``, ``.onnx``), or an ONNX
        model in memory.
    example_inputs : torch.Tensor or tuple, optional
        Needed for a module: the shapes to compile for. Anything else has its shapes already; they must be these.
    dtype : {"f32", "bf16"}
        What compute-intensive ops run in. ``"bf16"`` needs a CPU for which oneDNN has bf16 (AVX-512 or AVX2-VNNI-2);
        elsewhere a warning says that they run in f32.
    policy : {"optimal", "propagate", "naive", "plain"}
        How formats are chosen: ``"optimal"`` takes the formats and implementations that cost least in all, by exact
        minimisation; the others are greedy (:mod:`fmtprop.passes.policies`).
    target : {"onednn", "mkldnn"}
        Who executes: the oneDNN library through its C API, or the oneDNN inside PyTorch through PyTorch's operators.
        Where no oneDNN library can be loaded, ``"mkldnn"`` does, with a warning.
    tune : {"auto", "model", "measure", "remeasure"}
        Where the costs of policy ``"optimal"`` come from: ``"model"`` is a roofline model, ``"measure"`` times on this
        machine what the tuning cache does not know, ``"remeasure"`` also what it knows (and decides anew which plan is
        the fastest), ``"auto"`` takes the cache where it knows and the model elsewhere. Target ``"mkldnn"`` has no
        cache: ``"auto"`` is the model there, and nothing that was measured is kept.
    verify : {"on", "off", "full"}
        ``"on"`` checks each distinct primitive once against its reference, ``"full"`` also the whole model.
    boundary : mapping of str to MemoryDesc, optional
        Format of graph inputs and outputs by name; row-major where not given. An input may have a blocked format, such
        as that of a PyTorch mkldnn tensor (:func:`fmtprop.inspect`), which is then read in place.
    pin : mapping of str to MemoryDesc or str, optional
        Formats that must be, as descriptors or tags: ``{"conv_3.dst": "nChw16c"}``. Only for policy ``"optimal"``.
    tune_budget : float, optional
        Seconds after which measuring ends; what was not measured keeps the model's figure.
    confirm : bool
        Whether to run the plan that is optimal by cost against others, `propagate`'s among them, and keep the fastest
        (the verdict is remembered). A plan with pins, or of target ``"mkldnn"``, is kept in any case.
    winograd : bool
        Whether policy ``"optimal"`` on target ``"onednn"`` may compute a convolution by Winograd's minimal filtering
        where that costs less (:mod:`fmtprop.passes.winograd`). The rounding error of the whole is then expected to be
        at most 1.8 times that of direct convolutions (``certificate.growth`` tells); packed weights are larger.
    special_values : {"fast", "exact"}, optional
        ``"exact"`` gives NaN and infinities wherever PyTorch does: what may treat them otherwise (oneDNN's ReLU,
        maxima, softmax, …) runs by PyTorch or by kernels of our own, and no convolution by filtering; slower.
        ``"fast"`` differs where docs/numerics.md says so, and is the default but for training: a loss that became NaN
        must be seen. Only for target ``"onednn"``.
    progress : callable, optional
        Called with steps done and steps in all while costs are measured.
    release_weights : bool
        Whether to free the model's own weights once the plan has them packed: a module's parameters and buffers become
        empty tensors, a graph's constants are dropped, so neither can be used again.
    training : bool
        Whether to plan forward and backward of a module as one step, and to return a module that trains: its call takes
        part in autograd, its parameters, buffers and state are the original's. It follows later changes of these, plans
        again for other shapes, modes and frozen parameters, and has random numbers (dropout) of torch's generator.
    memory : {"save", "recompute"}
        With ``training=True``: whether what the backward pass reads is saved, or computed again where that is cheap.
    kwargs : mapping of str to object, optional
        Example keyword arguments of a module, as ``example_inputs`` are its positional ones.
    dynamic_shapes : dict, tuple or list, optional
        Which axes of a module's inputs may change, as ``torch.export.export`` takes it. Each shape is planned when it
        is first met. An exported program with dynamic shapes needs no word.
    max_shapes : int
        Plans of a model with dynamic shapes that are kept; the one that was used longest ago goes first.
    shapes : mapping of str to sequence of int, optional
        For an ONNX model: dimensions of inputs with dynamic axes, by input.

    Returns
    -------
    CompiledModel
        A :class:`~fmtprop.training.module.TrainingModule` with ``training=True``, a :class:`DynamicModel` where shapes
        are dynamic.

    Raises
    ------
    ImportModelError
        The model cannot be imported, or the example inputs are not those that it was imported with.
    GraphError
        A graph, or the file of one, breaks a rule (:mod:`fmtprop.ir.verify`).
    UnsupportedOpError
        A parameter is not one of its values, or nobody can run an op.
    PlanError
        The plan's own check failed and could not be planned around.

    Examples
    --------
    >>> import torch, fmtprop as fp
    >>> net = fp.compile(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()), torch.ones(2, 8))
    >>> net(torch.ones(2, 8)).shape
    torch.Size([2, 4])
    """
    if not isinstance(boundary, Mapping | None):
        raise UnsupportedOpError(
            f"boundary must map names of inputs and outputs to MemoryDesc, got {type(boundary).__name__}"
        )
    if not isinstance(pin, Mapping | None):
        raise UnsupportedOpError(f'pin must map "node.operand" to a MemoryDesc or a tag, got {type(pin).__name__}')
    if not isinstance(release_weights, bool):
        raise UnsupportedOpError(
            f"The 'release_weights' parameter of compile must be True or False. Got {release_weights!r} instead."
        )
    options = Options(
        dtype=dtype,
        policy=policy,
        target=target,
        tune=tune,
        verify=verify,
        boundary=dict(boundary or {}),
        pin=dict(pin or {}),
        tune_budget=tune_budget,
        confirm=confirm,
        winograd=winograd,
        special_values=special_values or ("exact" if training else "fast"),
        progress=progress,
        memory=memory,
    )
    if dynamic_shapes is not None and (training or not isinstance(model, torch.nn.Module)):
        raise UnsupportedOpError(
            "dynamic_shapes is for modules, and not for training, which plans each shape when it is met: leave it out"
        )
    if training and kwargs:
        raise UnsupportedOpError("kwargs with training=True: give the example inputs by position")
    if training:
        return _trained(model, example_inputs, options)
    with on_cpu():
        if is_onnx(model):
            graph = from_onnx(model, shapes)
            check_examples(graph, example_inputs, kwargs)
            return compile_graph(graph, options)
        if shapes:
            raise ImportModelError("shapes are for ONNX models with dynamic axes; others have example inputs")
        if isinstance(model, str | os.PathLike):
            path = os.fspath(model)
            graph = load(path, deferred=True)
            check_examples(graph, example_inputs, kwargs)
            return compile_graph(graph, options, owned=path.lower().endswith(".pt2"))
        net: CompiledModel | DynamicModel
        if dynamic_shapes is not None or _has_symbols(model):
            exported = from_torch_symbolic(model, example_inputs, kwargs=kwargs, dynamic_shapes=dynamic_shapes)
            net = DynamicModel(exported, compile_graph, options, max_shapes)
        else:
            net = compile_graph(_import(model, example_inputs, kwargs), options)
    if release_weights:
        release(model if isinstance(model, Graph) else Graph(), None if isinstance(model, Graph) else model)
        dnnl.trim_heap()
    return net


def _trained(model: Any, example_inputs: Any, options: Options) -> TrainingModule:
    from fmtprop.training.module import TrainingModule

    return TrainingModule(model, example_inputs, options, compile_graph)


def compile_graph(graph: Graph, options: Options, *, owned: bool = False) -> CompiledModel:
    """Plan an imported graph; :func:`compile` behind the import.

    Parameters
    ----------
    graph : Graph
        Imported.
    options : Options
        How.
    owned : bool
        Whether nobody else has the graph's constants: the compilation drops them as it packs them.

    Returns
    -------
    CompiledModel

    Raises
    ------
    GraphError, PlanError, UnsupportedOpError
        As :func:`compile`.
    """
    options = _executable(options)
    # the caller's autocast is no part of what is computed here, and what is made in inference mode is for that alone
    with torch.autocast("cpu", enabled=False), torch.inference_mode(mode=False), collector.paused():
        if dnnl.fork_guard():
            net = dnnl.after_fork(lambda: _compile_graph(graph, options, owned))
        else:
            net = _compile_graph(graph, options, owned)
    dnnl.trim_heap()  # of the weights that are packed now
    return net


def _compile_graph(graph: Graph, options: Options, owned: bool) -> CompiledModel:
    _check_boundary(graph, options.boundary)
    compilation = Compilation(graph, options, owned=owned and options.verify != "full")
    compilation.run()
    net = CompiledModel(compilation)
    if options.verify == "full":
        _check_whole(net, graph)
    return net


def _has_symbols(model: Any) -> bool:
    return isinstance(model, torch.export.ExportedProgram) and not Sizes(model).are_fixed


def _import(model: Any, example_inputs: Any, kwargs: Mapping[str, Any] | None) -> Graph:
    if isinstance(model, Graph):
        if any(node.descs for node in model.nodes()):
            raise GraphError(
                f"graph {model.name} has its formats already, and its weights are packed for them: compile the graph "
                "that it was made of, from fmtprop.load or fmtprop.from_torch, or the module itself"
            )
        check_examples(model, example_inputs, kwargs)
        return model
    if isinstance(model, torch.nn.Module | torch.export.ExportedProgram):
        return from_torch(model, example_inputs, kwargs=kwargs)
    raise ImportModelError(
        f"cannot compile a {type(model).__name__}: pass a torch.nn.Module, an ExportedProgram, a fmtprop Graph, the "
        "name of a built-in graph, the path of a file, or an ONNX model"
    )


def _executable(options: Options) -> Options:
    """Return the options with a target that can run here: PyTorch's own oneDNN where there is no library."""
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
            raise UnsupportedOpError(
                f"boundary names {name!r}, but the inputs and outputs of {graph.name} are {', '.join(types)}"
            )
        type_ = types[name]
        is_input = name in {node.name for node in graph.input_nodes}
        fits = (desc.dims, desc.dtype) == (type_.dims, type_.dtype) and desc.kind == "blocked"
        if not fits or not (desc.is_plain or is_input):
            extra = "" if is_input else ", and strides without blocks"
            raise UnsupportedOpError(
                f"boundary[{name!r}] is {desc}, but {name} is {type_}: it needs these dims and data type{extra}"
            )
        if desc.has_broadcast:
            raise UnsupportedOpError(
                f"boundary[{name!r}] is {desc}, of which several elements lie in one place: give each its own; a call "
                "takes tensors of any strides"
            )
        if desc.is_plain and desc.offset0:
            raise UnsupportedOpError(
                f"boundary[{name!r}] is {desc}, which begins {desc.offset0} elements before the tensor's first: a "
                "tensor is given by its own first element; use the same with at_start()"
            )


def _check_whole(net: CompiledModel, graph: Graph) -> None:
    from fmtprop.ops.evaluate import evaluate
    from fmtprop.report.comparison import TOLERANCES

    inputs = net.random_inputs()
    expected = evaluate(graph, {node.name: x for node, x in zip(graph.input_nodes, inputs, strict=True)})
    tolerance = TOLERANCES[net.precision]
    for (name, _), got, want in zip(net.plan.outputs, net.run_flat(inputs), expected, strict=True):
        error = error_of_numbers(got, want)
        if error > tolerance:
            raise PlanError(
                f"model {graph.name}: output {name} is off by {error:.1e} relative to PyTorch (tolerance "
                f"{tolerance:.0e}); report it with the model, and compile with policy='plain' meanwhile"
            )
