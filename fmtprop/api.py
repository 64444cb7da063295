"""The front door: compile a model, run it, ask what happened.

Ties the stages together in their order (import, normalise, assign, plan, run) and decides nothing itself.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fmtprop import dnnl
from fmtprop.errors import ImportModelError, InputError, PlanError, UnsupportedOpError
from fmtprop.frontends import from_torch, load
from fmtprop.ir.graph import Graph
from fmtprop.ir.structure import flatten_arguments, restructure
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assign import AssignFormats
from fmtprop.passes.policies import POLICIES
from fmtprop.runtime import Executor, Plan, build_plan
from fmtprop.runtime.selfcheck import Memory, Mismatch, check_steps
from fmtprop.stages import normalise
from fmtprop.targets import OneDnnTarget, ReferenceTarget

if TYPE_CHECKING:
    from fmtprop.report import Report

#: how often a plan whose own check failed is planned again around the failure
_ATTEMPTS = 5


@dataclass(frozen=True)
class Options:
    """How a model was compiled; every field as :func:`compile` takes it.

    Parameters
    ----------
    dtype, policy, target, tune, verify : str
        See :func:`compile`.
    boundary : mapping of str to MemoryDesc
        See :func:`compile`.
    """

    dtype: str = "f32"
    policy: str = "propagate"
    target: str = "onednn"
    tune: str = "auto"
    verify: str = "on"
    boundary: Mapping[str, MemoryDesc] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: dict[str, tuple[str, ...]] = {
            "dtype": ("f32", "bf16"),
            "policy": tuple(POLICIES),
            "target": ("onednn",),
            "tune": ("auto", "model"),
            "verify": ("off", "on", "full"),
        }
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                listed = ", ".join(repr(v) for v in values)
                raise UnsupportedOpError(
                    f"The {name!r} parameter of compile must be one of {listed}. Got {value!r} instead."
                )
        for name, desc in self.boundary.items():
            if not isinstance(desc, MemoryDesc):
                raise UnsupportedOpError(f"boundary[{name!r}] must be a MemoryDesc, got {type(desc).__name__}")


class CompiledModel:
    """A model that is planned and ready to run. Made by :func:`compile`.

    Parameters
    ----------
    graph : Graph
        The formatted graph.
    plan : Plan
        The frozen plan.
    options : Options
        How it was compiled.
    seconds : mapping of str to float
        Time that each stage of the compilation took.
    precision : str
        The data type that compute-intensive ops really run in.
    """

    def __init__(
        self, graph: Graph, plan: Plan, options: Options, seconds: Mapping[str, float], precision: str
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.options = options
        self.compile_seconds = dict(seconds)
        self.precision = precision
        self._executor = Executor(plan)
        self._flat = _is_flat(graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on torch tensors.

        Parameters
        ----------
        *args, **kwargs
            As the original model takes them; shapes and data types of the example inputs, any strides.

        Returns
        -------
        object
            What the original model returns: a tensor, or tensors in its own structure. They are the caller's to keep.

        Raises
        ------
        InputError
            An input does not fit.
        """
        if self._flat and not kwargs:
            results = self._executor.run(args)
            return results[0] if len(results) == 1 else tuple(results)
        results = self._executor.run(flatten_arguments(self.graph.structure, args, kwargs))
        return restructure(self.graph.structure, results)

    def run_flat(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on the graph's inputs in their order; return its outputs in theirs.

        Raises
        ------
        InputError
            An input does not fit.
        """
        return self._executor.run(inputs)

    def profile(self, *args: Any, repeats: int = 10, **kwargs: Any) -> list[float]:
        """Return the median seconds of every step of the plan.

        Parameters
        ----------
        *args, **kwargs
            Inputs; random ones when none are given.
        repeats : int
            Runs, after two that are not counted.

        Returns
        -------
        list of float
            Seconds, in the order of ``plan.steps``.
        """
        _check_repeats(repeats)
        inputs = flatten_arguments(self.graph.structure, args, kwargs) if args or kwargs else self.random_inputs()
        runs = [self._executor.profile(inputs)[1] for _ in range(repeats + 2)][2:]
        return [sorted(times)[len(times) // 2] for times in zip(*runs, strict=True)]

    def random_inputs(self, seed: int = 0) -> list[torch.Tensor]:
        """Return seeded random inputs that fit the model: normal for floats, 0 or 1 for integers and booleans."""
        return random_inputs(self.graph, seed)

    def report(self, repeats: int = 10) -> Report:
        """Measure the plan and return what each reorder costs and why it is there.

        Parameters
        ----------
        repeats : int
            Runs over which each step's median is taken.
        """
        from fmtprop.report import Report

        _check_repeats(repeats)
        return Report.of(self, repeats=repeats)

    def close(self) -> None:
        """Release the native objects of idle contexts; the model can still be run."""
        self._executor.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        """Return a model with contexts of its own; the plan and the constants, which never change, are shared."""
        return CompiledModel(self.graph, self.plan, self.options, self.compile_seconds, self.precision)

    def __copy__(self) -> CompiledModel:
        """Return a model with contexts of its own, as a deep copy is."""
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        """Refuse to be pickled.

        Raises
        ------
        PlanError
            Always.
        """
        raise PlanError(
            f"{self!r} cannot be pickled: its primitives are machine code of this process. Save the module "
            "(torch.export.save) or its graph (fmtprop.save), and compile it where it is loaded"
        )

    def __repr__(self) -> str:
        size = f"{len(self.plan.steps)} steps, {len(self.plan.reorders)} reorders"
        return f"<CompiledModel {self.graph.name}: policy {self.options.policy}, {self.precision}, {size}>"


def compile(
    model: Any,
    example_inputs: Any = None,
    dtype: str = "f32",
    policy: str = "propagate",
    target: str = "onednn",
    tune: str = "auto",
    *,
    verify: str = "on",
    boundary: Mapping[str, MemoryDesc] | None = None,
) -> CompiledModel:
    """Plan the memory format of every tensor of a model and make it ready to run.

    The model is taken as it is now: later changes of its parameters, or of ``torch.set_num_threads``, do not reach it.
    What an enclosing ``torch.autocast`` makes of a module becomes part of it; around a call, it changes nothing.

    Parameters
    ----------
    model : torch.nn.Module, torch.export.ExportedProgram, Graph, str or path
        A module, an op graph, the name of a built-in graph, or a file (graph ``.json``, ``.pt2``).
    example_inputs : torch.Tensor or tuple, optional
        Needed for a module: the shapes to compile for.
    dtype : {"f32", "bf16"}
        What compute-intensive ops run in. ``"bf16"`` needs a CPU for which oneDNN has bf16 (AVX-512 or AVX2-VNNI-2);
        elsewhere a warning says that they run in f32.
    policy : {"propagate", "naive", "plain"}
        How formats are chosen.
    target : {"onednn"}
        Who executes.
    tune : {"auto", "model"}
        Where costs come from; both use the model until a tuning cache exists.
    verify : {"on", "off", "full"}
        ``"on"`` checks each distinct primitive once against its reference, ``"full"`` also the whole model.
    boundary : mapping of str to MemoryDesc, optional
        Format of graph inputs and outputs by name; row-major where not given.

    Returns
    -------
    CompiledModel

    Raises
    ------
    ImportModelError
        The model cannot be imported.
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
    options = Options(dtype, policy, target, tune, verify, dict(boundary or {}))
    with torch.device("cpu"):  # whatever the caller's default device is
        return compile_graph(_import(model, example_inputs), options)


def compile_graph(graph: Graph, options: Options) -> CompiledModel:
    """Plan an imported graph; :func:`compile` behind the import.

    Raises
    ------
    PlanError, UnsupportedOpError
        As :func:`compile`.
    """
    with torch.autocast("cpu", enabled=False):  # the caller's is no part of what is computed here
        if dnnl.fork_guard():
            net = dnnl.after_fork(lambda: _compile_graph(graph, options))
        else:
            net = _compile_graph(graph, options)
    dnnl.trim_heap()  # of the weights that are packed now
    return net


def _compile_graph(graph: Graph, options: Options) -> CompiledModel:
    _check_boundary(graph, options.boundary)
    clock = _Clock()
    normal, precision = normalise(graph, options.dtype)
    clock.lap("normalise")
    target, fallback = OneDnnTarget(), ReferenceTarget()
    memory = Memory() if options.verify != "off" else None
    for _ in range(_ATTEMPTS):
        formatted = AssignFormats(options.policy, target, fallback, options.boundary).run(normal)
        verify(formatted, Stage.FORMATTED)
        clock.lap("assign")
        plan = build_plan(formatted, target)
        clock.lap("plan")
        wrong = check_steps(plan.steps, memory) if memory is not None else []
        clock.lap("check")
        if not wrong:
            break
        _reroute(target, wrong)
    else:
        raise PlanError(f"model {graph.name}: primitives keep failing their check; the last: {wrong[0]}")
    formatted.constants.clear()
    net = CompiledModel(formatted, plan, options, clock.seconds, precision)
    if options.verify == "full":
        _check_whole(net, graph)
    return net


def random_inputs(graph: Graph, seed: int = 0) -> list[torch.Tensor]:
    """Return seeded random inputs of a graph: normal for floats, 0 or 1 for integers and booleans."""
    from fmtprop.ir.tensors import torch_dtype

    generator = torch.Generator("cpu").manual_seed(seed)
    inputs = []
    for node in graph.input_nodes:
        dtype = torch_dtype(node.results[0].dtype)
        if node.results[0].dtype.is_floating:
            drawn = torch.randn(node.results[0].dims, generator=generator, dtype=torch.float32, device="cpu")
            inputs.append(drawn.to(dtype))
        else:
            inputs.append(torch.randint(0, 2, node.results[0].dims, generator=generator, device="cpu").to(dtype))
    return inputs


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected magnitude; inf where NaN or infinity disagree."""
    got, expected = got.detach().double(), expected.detach().double()
    if got.shape != expected.shape:
        return float("inf")
    finite = torch.isfinite(expected)
    if not torch.equal(got[~finite].nan_to_num(), expected[~finite].nan_to_num()):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = expected[finite].abs().max().item()
    worst = (got - expected)[finite].abs().nan_to_num(float("inf")).max().item()
    return worst / scale if scale else worst


def _import(model: Any, example_inputs: Any) -> Graph:
    if isinstance(model, Graph):
        return model
    if isinstance(model, str | os.PathLike):
        return load(os.fspath(model))
    if isinstance(model, torch.nn.Module | torch.export.ExportedProgram):
        return from_torch(model, example_inputs)
    raise ImportModelError(
        f"cannot compile a {type(model).__name__}: pass a torch.nn.Module, an ExportedProgram, a fmtprop Graph, the "
        "name of a built-in graph or the path of a graph file"
    )


def _check_repeats(repeats: int) -> None:
    if repeats < 1:
        raise InputError(f"repeats must be at least 1 for a median, got {repeats}")


def _check_boundary(graph: Graph, boundary: Mapping[str, MemoryDesc]) -> None:
    types = {node.name: node.results[0] for node in graph.input_nodes}
    types |= {node.name: graph.type_of(graph.inputs(node.name)["src"]) for node in graph.output_nodes}
    for name, desc in boundary.items():
        if name not in types:
            raise UnsupportedOpError(
                f"boundary names {name!r}, but the inputs and outputs of {graph.name} are {', '.join(types)}"
            )
        type_ = types[name]
        if (desc.dims, desc.dtype) != (type_.dims, type_.dtype) or not desc.is_plain:
            raise UnsupportedOpError(
                f"boundary[{name!r}] is {desc}, but {name} is {type_}: it needs these dims and data type, and strides "
                "without blocks"
            )


def _reroute(target: OneDnnTarget, wrong: list[Mismatch]) -> None:
    for mismatch in wrong:
        warnings.warn(f"{mismatch}; planning around it", RuntimeWarning, stacklevel=4)
        target.reject(mismatch.node)


def _check_whole(net: CompiledModel, graph: Graph) -> None:
    from fmtprop.ops.evaluate import evaluate
    from fmtprop.report.comparison import TOLERANCES

    inputs = net.random_inputs()
    expected = evaluate(graph, {node.name: x for node, x in zip(graph.input_nodes, inputs, strict=True)})
    tolerance = TOLERANCES[net.precision]
    for (name, _), got, want in zip(net.plan.outputs, net.run_flat(inputs), expected, strict=True):
        error = relative_error(got, want) if want.dtype.is_floating_point else float(not torch.equal(got, want))
        if error > tolerance:
            raise PlanError(
                f"model {graph.name}: output {name} is off by {error:.1e} relative to PyTorch (tolerance "
                f"{tolerance:.0e}); report it with the model, and compile with policy='plain' meanwhile"
            )


def _is_flat(graph: Graph) -> bool:
    """Whether arguments are plain positional tensors and the result a tensor or a tuple of tensors, in graph order."""
    if not graph.structure:
        return True
    data = json.loads(graph.structure)
    slots = [{"slot": i} for i in range(len(graph.input_nodes))]
    outs = [{"slot": i} for i in range(len(graph.output_nodes))]
    results = data["results"]
    single = len(outs) == 1 and results == outs[0]
    return (
        [spec for _, spec in data["positional"]] == slots
        and not data["keyword"]
        and (single or (len(outs) > 1 and results == {"tuple": outs}))
    )


class _Clock:
    """Time by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, stage: str) -> None:
        now = perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
