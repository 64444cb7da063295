"""The main entry point: compile a model.

Ties the stages together in their order (import, normalise, assign, plan, run) and decides nothing itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from fmtprop import dnnl
from fmtprop.capture import from_torch, load
from fmtprop.capture.examples import check_examples
from fmtprop.capture.methods import as_module
from fmtprop.capture.specialise import Sizes
from fmtprop.capture.torch_export import from_torch_symbolic
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.dynamic import DynamicModel
from fmtprop.compiling.from_graph import compile_graph
from fmtprop.compiling.inputs import random_inputs
from fmtprop.compiling.options import DEFAULT_POLICY, KEPT, Options, Tune
from fmtprop.compiling.program import SharedProgram
from fmtprop.compiling.sensitivity import Accuracy
from fmtprop.errors import GraphError, ImportModelError, OptionError
from fmtprop.ir.graph import Graph
from fmtprop.layout import MemoryDesc
from fmtprop.onnx.model import from_onnx, is_onnx
from fmtprop.report.accuracy import calls_of
from fmtprop.runtime.constants import release
from fmtprop.runtime.threads import on_cpu

if TYPE_CHECKING:
    from fmtprop.compiling.tradeoff import Tradeoff
    from fmtprop.training.module import TrainingModule

__all__ = ["CompiledModel", "DynamicModel", "Options", "Tune", "compile", "compile_graph", "random_inputs", "tradeoff"]


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


def compile(  # type: ignore[misc]  # the overloads leave out the common parameters
    model: Any,
    example_inputs: Any = None,
    dtype: str | torch.dtype = "f32",
    policy: str = DEFAULT_POLICY,
    target: str = "onednn",
    tune: str | Tune = "auto",
    *,
    verify: str = "on",
    boundary: Mapping[str, MemoryDesc] | None = None,
    pin: Mapping[str, MemoryDesc | str] | None = None,
    tune_budget: float | None = None,
    confirm: bool = True,
    winograd: bool = True,
    deterministic: bool = False,
    special_values: str | None = None,
    weights: str | None = None,
    embeddings: str | None = None,
    keep_float: Sequence[str] = (),
    accuracy: Accuracy | None = None,
    replan: str = "now",
    progress: Callable[[int, int], None] | None = None,
    release_weights: bool = False,
    training: bool = False,
    memory: str = "save",
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    max_shapes: int = 8,
    buckets: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
    shapes: Mapping[str, Sequence[Any]] | None = None,
) -> CompiledModel | DynamicModel | TrainingModule:
    """Plan the memory format of every tensor of a model, and prepare the model to run.

    Later changes of the model's parameters have no effect. Threads follow torch: formats and implementations are
    chosen for the present number of threads, and a run uses the number at the time of the run. If a module uses
    ``torch.autocast`` inside, the conversions become part of the compiled model; ``torch.autocast`` around a call has
    no effect. A module is always compiled in evaluation mode, and results of the compiled model have no gradients.

    Parameters
    ----------
    model : torch.nn.Module, method, torch.export.ExportedProgram, Graph, str, path, bytes or onnx.ModelProto
        A module or a method of one (``model.decode``), an op graph, the name of a built-in graph, a file (graph
        ``.json``, ``.pt2``, ``.onnx``), or an ONNX model in memory.
    example_inputs : torch.Tensor or tuple, optional
        Required for a module: they fix the shapes. Other models have shapes already, which must be equal.
    dtype : {"f32", "bf16", "f16"} or torch.dtype
        Data type of compute-intensive ops. ``"bf16"`` needs a CPU with AVX512-BF16 or AVX2-VNNI-2 (a requirement of
        oneDNN); on other CPUs a warning says that f32 is used. ``"f16"`` needs a CPU with AVX512-FP16 or AVX2-VNNI-2,
        and is an error elsewhere; numbers above 65504 become infinite.
    policy : {"optimal", "propagate", "naive", "plain"}
        Policy of format assignment: ``"optimal"`` chooses formats and implementations of the least total cost, by
        exact minimisation; the others are greedy (:mod:`fmtprop.passes.assignment.policies`).
    target : {"onednn", "mkldnn"}
        Target that executes: the oneDNN library through its C API, or the oneDNN inside PyTorch through PyTorch's
        operators. If no oneDNN library can be loaded, ``"mkldnn"`` is used, with a warning.
    tune : {"auto", "lazy", "model", "measure", "remeasure"} or Tune
        Source of the costs of policy ``"optimal"``. ``"model"`` is a roofline model. ``"measure"`` measures the costs
        that the tuning cache lacks, on this machine. ``"remeasure"`` measures all costs, and also repeats the race of
        plans. ``"auto"`` uses the cache's costs, and the model for the others. ``"lazy"`` answers the first calls by a
        greedy plan, while that of ``"auto"`` is made in the background and takes its place between two calls
        (``net.settle()`` waits for it); where an earlier process has found that plan, it answers from the beginning.
        With ``deterministic=True``, ``pin``, ``weights``, ``embeddings`` or ``keep_float``, it is ``"auto"``.
        The two that measure also run every plan that may be the fastest, not only some: :class:`Tune` sets source and
        effort apart.
    verify : {"on", "off", "full"}
        ``"on"`` checks each distinct primitive once against its reference, ``"full"`` also the whole model.
    boundary : mapping of str to MemoryDesc, optional
        Format of graph inputs and outputs by name. Default: row-major. An input may have a blocked format, such as
        that of a PyTorch mkldnn tensor (:func:`fmtprop.inspect`), which is then read in place.
    pin : mapping of str to MemoryDesc or str, optional
        Required formats, as descriptors or tags: ``{"conv_3.dst": "nChw16c"}``. Only for policy ``"optimal"``.
    tune_budget : float, optional
        Seconds for measuring; costs that are not measured in this time come from the model.
    confirm : bool
        Whether to race the plan that is optimal by cost with others, including `propagate`'s, and keep the fastest
        (the verdict is recorded). A plan with pins is always kept. With ``training=True`` also whether the first call
        of each step runs in turns with PyTorch's own, three times or a few more, and the faster is kept, except with
        ``tune="model"``, ``memory="recompute"`` or another policy.
    winograd : bool
        Whether policy ``"optimal"`` on target ``"onednn"`` may compute a convolution by Winograd's minimal filtering
        if this costs less (:mod:`fmtprop.passes.variants.winograd`). The expected rounding error of the whole model is
        then at most 1.6 times that of direct convolutions (see ``certificate.growth``), and packed weights are larger.
    deterministic : bool
        Whether every compilation of the model with this library, instruction set and number of threads makes the same
        plan: it is chosen by modelled costs with fixed figures of the machine. Nothing is measured, no recorded figure
        is used, and no plans are compared. (A solver that needs more than two minutes is stopped wherever it is.)
    special_values : {"fast", "kept", "exact"}, optional
        ``"exact"`` gives the same NaN and infinities as PyTorch. Ops with another treatment in oneDNN (ReLU, maxima,
        softmax, …) run by PyTorch or by the project's own kernels, and filtering is off, so it is slower. ``"kept"``
        differs only in filtered convolutions, which make NaN of an infinity, and of more results. ``"fast"`` differs
        as described in docs/numerics.md. The default is ``"fast"``, in training ``"kept"``: there, a loss of NaN must
        be visible. ``"kept"`` and ``"exact"`` need target ``"onednn"``.
    weights : {None, "int8", "int4"}
        ``"int8"`` or ``"int4"`` keeps the weights of large products as codes, rounded to the nearest: 128 neighbours
        (64 or 32 where a row is no multiple) share a scale. A step of a language model takes the time of reading its
        weights, so it is faster by the bytes that are saved. Products of up to 16 rows decode in registers; for more
        rows, one matrix after another is decoded in each run.
    embeddings : {None, "int8", "int4"}
        ``"int8"`` or ``"int4"`` keeps the tables of embeddings as such codes, too, of which rows are decoded when they
        are read. A head that shares the table multiplies by the same codes.
    keep_float : sequence of str
        Nodes of a quantized model that the quantizer should have left out: names or origins as ``fmtprop show`` and
        the report print them, with ``*`` for any text. They read numbers that are not rounded, but limited to the same
        range, and so compute in floats. With ``["*"]`` no node reads rounded numbers. Weights stay as the model has
        them.
    accuracy : Accuracy, optional
        Largest error of a quantized model, relative to the same model without roundings: as few nodes as it needs
        are in ``keep_float``, the most sensitive ones. It takes a run for each node, in PyTorch, and
        ``net.options.keep_float`` has the answer; :func:`fmtprop.tradeoff` makes a table of all.
    replan : {"now", "background", "never"}
        With ``dynamic_shapes``: what happens at a shape that has more than eight times as many elements as every
        planned one, or fewer than an eighth. ``"now"`` plans it as any model before its first call returns.
        ``"background"`` answers by the choices of the most similar shape while such a plan is made, which then takes
        its place between two calls. ``"never"`` keeps the choices of the most similar shape. Results of the two plans
        differ as those of two implementations do.
    progress : callable, optional
        Called with steps done and steps in all while costs are measured.
    release_weights : bool
        Whether to free the model's own weights after the plan has packed them: a module's parameters and buffers
        become empty tensors, a graph's constants are dropped, so neither can be used again.
    training : bool
        Whether to plan forward and backward of a module as one step, and to return a module for training. Its calls
        take part in autograd, and it shares parameters, buffers and state with the original. It follows later changes
        of these, plans again for other shapes, modes and frozen parameters, and uses torch's random numbers (dropout).
    memory : {"save", "recompute"}
        With ``training=True``: whether tensors for the backward pass are saved, or computed again if this is cheap.
    kwargs : mapping of str to object, optional
        Example keyword arguments of a module (``example_inputs`` are the positional ones).
    dynamic_shapes : dict, tuple or list, optional
        Axes of a module's inputs that may change, as in ``torch.export.export``. Each shape is planned at its first
        use. Not required for an exported program with dynamic shapes.
    max_shapes : int
        Number of plans that are kept for a model with dynamic shapes. With so many, PyTorch runs another shape until
        its third call; then it takes the place of the least recently used plan.
    buckets : mapping of str to mapping of int to sequence of int, optional
        With ``dynamic_shapes``, sizes by input and axis, such as ``{"tokens": {1: (64, 256)}}``. A call is padded with
        zeros to the next larger size, and its results are cut, so that few plans serve many sizes. The first padded
        call of each size is compared with one without padding: a model with other results raises an error.
    shapes : mapping of str to sequence, optional
        For an ONNX model: dimensions of inputs with dynamic axes, by input. With ``dynamic_shapes``: sizes that are
        planned at once, as of :meth:`DynamicModel.warm_up`, such as ``{"x": (1, 3, (320, 640, 32), 64)}``.

    Returns
    -------
    CompiledModel
        A :class:`~fmtprop.training.module.TrainingModule` with ``training=True``, a :class:`DynamicModel` for dynamic
        shapes.

    Raises
    ------
    ImportModelError
        The model cannot be imported, or the example inputs differ from those of the import.
    GraphError
        A graph, or the file of one, breaks a rule (:mod:`fmtprop.ir.verify`).
    OptionError
        A parameter has an unknown value.
    UnsupportedOpError
        No target can run an op, or this CPU lacks f16.
    PlanError
        The plan's self-check failed, and no other implementation passes it.

    Examples
    --------
    >>> import torch, fmtprop as fp
    >>> net = fp.compile(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()), torch.ones(2, 8))
    >>> net(torch.ones(2, 8)).shape
    torch.Size([2, 4])
    """
    model = as_module(model)
    is_symbolic = dynamic_shapes is not None or _has_symbols(model)
    _check_together(model, dtype, release_weights, training, dynamic_shapes, is_symbolic, kwargs)
    if buckets and not is_symbolic:
        raise OptionError("buckets are sizes of axes that dynamic_shapes marks: give dynamic_shapes, too")
    options = Options(
        dtype=dtype,  # type: ignore[arg-type]  # kept as its short name
        policy=policy,
        target=target,
        tune=tune,
        verify=verify,
        boundary={} if boundary is None else boundary,
        pin={} if pin is None else pin,
        tune_budget=tune_budget,
        confirm=confirm,
        winograd=winograd,
        deterministic=deterministic,
        special_values=special_values or (KEPT if training else Options.special_values),
        progress=progress,
        memory=memory,
        weights=weights,
        embeddings=embeddings,
        keep_float=keep_float,
        replan=replan,
    )
    if accuracy is not None and (training or is_symbolic or keep_float or not isinstance(accuracy, Accuracy)):
        raise OptionError(
            "accuracy is an fmtprop.Accuracy(data, sqnr_db=…) for inference with fixed shapes, and chooses keep_float"
        )
    if training:
        if options.codes:
            raise OptionError(f"{options.codes} is for inference: a step of training changes its weights")
        return _trained(model, example_inputs, options)
    with on_cpu():
        if is_onnx(model):
            graph = from_onnx(model, shapes)
            check_examples(graph, example_inputs, kwargs)
            return _planned(graph, options, accuracy)
        if shapes and not is_symbolic:
            raise ImportModelError("shapes are for models with dynamic axes; others have example inputs")
        if isinstance(model, str | os.PathLike):
            path = os.fspath(model)
            graph = load(path, deferred=True)
            check_examples(graph, example_inputs, kwargs)
            return _planned(graph, options, accuracy, owned=path.lower().endswith(".pt2"))
        net: CompiledModel | DynamicModel
        if is_symbolic:
            exported = from_torch_symbolic(model, example_inputs, kwargs=kwargs, dynamic_shapes=dynamic_shapes)
            program = SharedProgram(exported)
            net = DynamicModel(exported.name, lambda: program, options, max_shapes, buckets)
            if shapes:
                net.warm_up(shapes)
        else:
            net = _planned(_import(model, example_inputs, kwargs), options, accuracy)
    if release_weights:
        release(model if isinstance(model, Graph) else Graph(), None if isinstance(model, Graph) else model)
        dnnl.trim_heap()
    return net


def _planned(graph: Graph, options: Options, accuracy: Accuracy | None, *, owned: bool = False) -> CompiledModel:
    if accuracy is None:
        return compile_graph(graph, options, owned=owned)
    from fmtprop.compiling.tradeoff import compile_within

    return compile_within(graph, options, accuracy)


def tradeoff(model: Any, data: Iterable[Any], *, counts: Sequence[int] | None = None, **options: Any) -> Tradeoff:
    """Return a table of time against error: a quantized model with more and more of its nodes in floats.

    The nodes that make the most noise in the results, each alone, come first. Plans are timed in turns, and their
    results are compared with those of the model without roundings.

    Parameters
    ----------
    model : torch.nn.Module, torch.export.ExportedProgram, Graph, str, path, bytes or onnx.ModelProto
        A quantized model with fixed shapes.
    data : iterable
        Typical inputs: each a tensor, a tuple of arguments or a mapping of named ones, as one call takes them.
    counts : sequence of int, optional
        Numbers of nodes in floats. Default: 0, 1, 2, 4, … and all.
    **options
        Other parameters of :func:`compile`, such as ``dtype``.

    Returns
    -------
    Tradeoff
        Print it, or see its ``rows`` and ``fastest(sqnr_db)``; ``to_json(path)``.

    Raises
    ------
    OptionError
        No node reads rounded numbers, or there are fewer than one of `counts`, or an option is unknown.
    InputError
        There are no inputs, or one does not fit.
    """
    from fmtprop.compiling.tradeoff import tradeoff_of

    inputs = list(calls_of(data))
    names = {one.name for one in fields(Options)}
    if unknown := sorted(options.keys() - names | options.keys() & {"keep_float"}):
        raise OptionError(f"tradeoff takes the options of a plan other than keep_float, not {', '.join(unknown)}")
    with on_cpu():
        if is_onnx(model):
            graph = from_onnx(model)
        elif isinstance(model, str | os.PathLike):
            graph = load(os.fspath(model))
        else:
            args, kwargs = inputs[0]
            graph = _import(as_module(model), args, kwargs)
        return tradeoff_of(graph, Options(**options), [kwargs or args for args, kwargs in inputs], counts)


def _check_together(
    model: Any,
    dtype: object,
    release_weights: bool,
    training: bool,
    dynamic_shapes: Any,
    is_symbolic: bool,
    kwargs: Mapping[str, Any] | None,
) -> None:
    """Check the parameters that are no options, and those that exclude each other."""
    if isinstance(dtype, torch.Tensor):
        raise OptionError("several example inputs are one tuple: write fp.compile(model, (x, y))")
    if isinstance(dynamic_shapes, int | str):
        raise OptionError(
            f"dynamic_shapes must be a dict of axes by argument, or a tuple of them, got {dynamic_shapes!r}"
        )
    if not isinstance(release_weights, bool):
        raise OptionError(
            f"The 'release_weights' parameter of compile must be True or False. Got {release_weights!r} instead."
        )
    if dynamic_shapes is not None and (training or not isinstance(model, torch.nn.Module)):
        raise OptionError(
            "dynamic_shapes is for modules, and not for training, which plans each new shape: leave it out"
        )
    if release_weights and (training or is_symbolic):
        raise OptionError(
            "release_weights frees the weights, which plans for other shapes and steps of training read: leave it out"
        )
    if training and kwargs:
        raise OptionError("kwargs with training=True: give the example inputs by position")


def _trained(model: Any, example_inputs: Any, options: Options) -> TrainingModule:
    from fmtprop.training.module import TrainingModule
    from fmtprop.training.rival import rival_of

    return TrainingModule(model, example_inputs, options, rival_of(options))


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
