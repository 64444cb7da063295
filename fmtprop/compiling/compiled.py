"""A compiled model: run it, measure it, report on it. Plans nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from time import perf_counter, time
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from fmtprop.compiling.improving import Improvement
from fmtprop.compiling.inputs import random_inputs
from fmtprop.compiling.saveable import Saveable
from fmtprop.compiling.serving import Serving
from fmtprop.errors import InputError
from fmtprop.ir import Graph, result_names
from fmtprop.ir.structure import argument_names, flatten_arguments, parsed, restructure
from fmtprop.runtime import Executor, Plan
from fmtprop.runtime.arenas import Arenas
from fmtprop.runtime.benchmark import BenchmarkResult, time_runs
from fmtprop.runtime.threads import current_threads
from fmtprop.system.limits import MAX_RUNS, MAX_THREADS
from fmtprop.system.printable import counted

if TYPE_CHECKING:
    from fmtprop.compiling.planned import Planned
    from fmtprop.compiling.saving import Saved
    from fmtprop.ir.node import Node
    from fmtprop.report import Report
    from fmtprop.report.accuracy import LayerErrors
    from fmtprop.runtime.plan import Step
    from fmtprop.targets.bound import Place

#: runs before those that count, and those that do, where nothing else is asked for
_WARMUP, _REPEATS = 3, 10


class CompiledModel(Serving, Saveable):
    """A model that is planned and ready to run. Made by :func:`compile`.

    Parameters
    ----------
    compilation : Planned
        It has run, or comes from a plan file.
    arenas : Arenas, optional
        Memory for activations, which the model's plans for other shapes use as well.

    Attributes
    ----------
    compilation : Compilation or Planned
        The results of all stages.
    graph : Graph
        The formatted graph.
    plan : Plan
        The frozen plan.
    options : Options
        How it was compiled.
    compile_seconds : dict of str to float
        Time that each stage of the compilation took.
    precision : str
        The data type that compute-intensive ops really run in.
    certificate : Certificate or None
        How good the `optimal` assignment is by its costs.
    race : Race or None
        How long the plans took that were run against each other, if they were.
    tuning : Tuning or None
        Where the costs of the `optimal` assignment came from.
    basis : Basis or None
        What these costs are made of, if the plan was chosen in this process: reports compare plans by the same costs.
    dropped : mapping of str to str
        Ways to run the model that failed while it was compiled and were left out, and why.
    left_out : mapping of str to str
        Comparisons of plans for which the compilation had no time, and why: it takes at most 5 s and 6 runs of the
        model. ``tune=Tune("auto", effort="patient")`` takes the time.
    """

    def __init__(self, compilation: Planned, arenas: Arenas | None = None) -> None:
        super().__init__()
        self._improvement: Improvement | None = None
        self._arenas = arenas or Arenas()
        self._take(compilation)

    def _take(self, compilation: Planned) -> None:
        """Run by this compilation's plan from now on; runs that have begun end by the last one's."""
        self.compilation = compilation
        self.graph, self.plan, self.options = compilation.formatted, compilation.plan, compilation.options
        self.compile_seconds, self.precision = compilation.seconds, compilation.precision
        self.certificate, self.race = compilation.certificate, compilation.race
        self.tuning, self.basis, self.dropped = compilation.tuning, compilation.basis, compilation.dropped
        self.left_out = compilation.left_out
        plan, graph = self.plan, self.graph
        self._executor = Executor(plan, compilation.plan_for, arenas=self._arenas, flushes=self.options.flushes)
        self._has_flat_inputs, self._has_flat_outputs = _are_flat(graph)
        self._arguments = frozenset(argument_names(graph.structure))

    def __call__(self, *args: Any, out: torch.Tensor | Sequence[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the model on torch tensors.

        Parameters
        ----------
        *args, **kwargs
            As the original model takes them; shapes and data types of the example inputs, any strides. Inputs that lie
            in memory as the plan reads them are not copied.
        out : torch.Tensor or sequence of torch.Tensor, optional
            Tensors to write the results to, one for each output of the graph, of its shape and data type. Without a
            copy where they lie in memory as the plan writes them: dense and row-major, if ``boundary`` said nothing
            else. None may share memory with another or with an input. A model with an argument of its own that is
            called ``out`` takes that by position; use :meth:`run_flat` to give it tensors for its results.

        Returns
        -------
        object
            The original model's result: a tensor, or tensors in its own structure; the tensors of ``out``, if given.
            New ones are the caller's to keep. They have no gradients, whether inputs require them or not.

        Raises
        ------
        InputError
            An input or a tensor of ``out`` does not fit, or the model has an argument ``out``.

        Notes
        -----
        A run uses as many threads as torch does (``torch.set_num_threads``). The first run with another number than
        the model was compiled with makes its primitives anew, which takes a moment.

        Examples
        --------
        >>> import torch, fmtprop as fp
        >>> net = fp.compile(torch.nn.ReLU(), torch.ones(3))
        >>> y = torch.empty(3)
        >>> net(torch.tensor([-1.0, 0.0, 2.0]), out=y) is y
        True
        >>> y
        tensor([0., 0., 2.])
        """
        if out is not None and "out" in self._arguments:
            raise InputError(
                f"{self.graph.name}: out= is ambiguous, since the model has an argument called 'out': give that by "
                "position, and tensors for the results to run_flat(inputs, out=...)"
            )
        return self._run(args, kwargs, out, None)

    def improve(self, better: Callable[[Callable[[str], None]], Planned]) -> None:
        """Make a better plan of the same model in the background, and run by that once it is ready.

        Parameters
        ----------
        better : callable
            Makes it, and calls its argument between its stages.
        """
        this = ref(self)

        def make(stage: Callable[[str], None]) -> None:
            made, model = better(stage), this()
            if model is not None:
                model._take(made)

        self._improvement = Improvement(make, self.graph.name)

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for a better plan that is being made in the background (``tune="lazy"``, ``replan="background"``).

        Parameters
        ----------
        timeout : float, optional
            The most seconds to wait.

        Returns
        -------
        bool
            Whether the present plan stays.
        """
        return self._improvement is None or self._improvement.wait(timeout)

    def run_flat(
        self, inputs: Sequence[torch.Tensor], out: torch.Tensor | Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Run on the graph's inputs in their order; return its outputs in theirs.

        Parameters
        ----------
        inputs : sequence of torch.Tensor
            One for each input of the graph.
        out : torch.Tensor or sequence of torch.Tensor, optional
            Tensors to write the results to, as in a call of the model.

        Raises
        ------
        InputError
            An input or a tensor of ``out`` does not fit.
        """
        if type(inputs) is not list and not isinstance(inputs, Sequence):  # the second check takes half a microsecond
            raise InputError(
                f"model {self.graph.name} takes a list or tuple of tensors, one for each input, got "
                f"{type(inputs).__name__}"
            )
        return self._executor.run(inputs, out)

    def prepare(self, threads: int) -> Plan:
        """Make the plan for a number of threads now, not at the first run with this number.

        Parameters
        ----------
        threads : int
            As given to :func:`torch.set_num_threads` before a run.

        Returns
        -------
        Plan
            It shares its packed constants with the plans for other numbers. :attr:`plan`, with a warning, if a node has
            no primitive for this number.

        Raises
        ------
        InputError
            `threads` is no number of threads.
        PlanError
            The primitives for this number keep failing their check.
        """
        if not isinstance(threads, int) or isinstance(threads, bool) or not 0 < threads <= MAX_THREADS:
            raise InputError(
                f"model {self.graph.name}: threads must be a whole number from 1 to {MAX_THREADS}, got {threads!r}"
            )
        return self._executor.prepare(threads)

    def _stream(self) -> tuple[Callable[..., Any], str]:
        self.prepare(1)
        return lambda *args, **kwargs: self._run(args, kwargs, None, 1), self.graph.name

    def benchmark(
        self,
        *args: Any,
        runs: int | None = None,
        seconds: float | None = None,
        warmup: int = _WARMUP,
        **kwargs: Any,
    ) -> BenchmarkResult:
        """Time the model: one run after the other, with the threads that torch uses now.

        Parameters
        ----------
        *args, **kwargs
            Inputs; random ones when none are given.
        runs : int, optional
            Runs that count. A model's own arguments of this name or the next two are given by position.
        seconds : float, optional
            How long to go on, if ``runs`` is not given; one second if neither is given.
        warmup : int
            Runs before, which don't count.

        Returns
        -------
        BenchmarkResult
            Every run's time, with median, quartiles and the fastest; new tensors for the results are part of a run.

        Raises
        ------
        InputError
            An input does not fit, a number is out of range, or the model has an argument of that name.

        Examples
        --------
        >>> import torch, fmtprop as fp
        >>> net = fp.compile(torch.nn.ReLU(), torch.ones(3))
        >>> net.benchmark(runs=5).runs
        5
        """
        self._check_names(runs=runs is not None, seconds=seconds is not None, warmup=warmup is not _WARMUP)
        inputs = self._inputs(args, kwargs)
        times = time_runs(lambda: self._executor.run(inputs), runs, seconds, warmup)
        threads = self.prepare(current_threads()).threads
        return BenchmarkResult(self.graph.name, self.precision, self.options.policy, threads, times)

    def profile(self, *args: Any, repeats: int = _REPEATS, **kwargs: Any) -> list[float]:
        """Return the median seconds of every step of the plan.

        Parameters
        ----------
        *args, **kwargs
            Inputs; random ones when none are given.
        repeats : int
            Runs, after two that are not counted. A model's own argument of this name is given by position.

        Returns
        -------
        list of float
            Seconds, in the order of ``plan.steps``.

        Raises
        ------
        InputError
            An input does not fit, a number is out of range, or the model has an argument of that name.
        """
        self._check_names(repeats=repeats is not _REPEATS)
        _check_repeats(repeats)
        inputs = self._inputs(args, kwargs)
        runs = [self._executor.profile(inputs)[1] for _ in range(repeats + 2)][2:]
        return [median(times) for times in zip(*runs, strict=True)]

    def timeline(self, *args: Any, **kwargs: Any) -> list[tuple[float, float]]:
        """Return the start and the duration of each step of one run.

        Parameters
        ----------
        *args, **kwargs
            Inputs; random ones when none are given.

        Returns
        -------
        list of (float, float)
            Seconds since 1970 and seconds, in the order of ``plan.steps``.

        Raises
        ------
        InputError
            An input does not fit.
        """
        spans = self._executor.timeline(self._inputs(args, kwargs))
        epoch = time() - perf_counter()
        return [(epoch + start, seconds) for start, seconds in spans]

    def watch(self, see: Callable[[Node, Callable[[], torch.Tensor | None]], None], *args: Any, **kwargs: Any) -> Any:
        """Run once, step by step, and show the numbers of each step.

        Parameters
        ----------
        see : callable
            Called after each step with its node, and with a function that returns a copy of its first result: f32 and
            row-major, whatever its format; numbers for which bytes stand; None for bytes that only the library reads.
        *args, **kwargs
            Inputs; random ones when none are given.

        Returns
        -------
        list of torch.Tensor
            The graph's outputs.

        Raises
        ------
        InputError
            An input does not fit.

        Examples
        --------
        >>> import torch, fmtprop as fp
        >>> net = fp.compile(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(-1)), torch.ones(2, 8))
        >>> results = net.watch(lambda node, read: print(node.op, tuple(read().shape)), torch.ones(2, 8))
        inner_product (2, 4)
        softmax (2, 4)
        """
        from fmtprop.runtime.reading import numbers_at

        def shown(step: Step, place: Place) -> None:
            see(step.node, lambda: numbers_at(place, step.node.grids.get(result_names(step.node)[0])))

        return self._executor.watch(self._inputs(args, kwargs), shown)

    def compare(self, other: Any, data: Iterable[Any]) -> LayerErrors:
        """Return the error of each layer against another model, such as that of an int8 plan against a float one.

        Parameters
        ----------
        other : CompiledModel or callable
            A compiled model: layers that both have are compared, too. Anything else that takes the same arguments,
            such as the original module: only the results are compared.
        data : iterable
            Inputs: each a tensor, a tuple of arguments or a mapping of named ones, as one call takes them.

        Returns
        -------
        LayerErrors
            Print it, or see its ``layers``, ``worst`` and ``results``; ``to_json(path)``.

        Raises
        ------
        InputError
            There are no inputs, one does not fit, or the other's results differ in number or shape.

        Notes
        -----
        Layers are the same if they are in the same place of the model (``origin``: a module's path and line, or the
        name of an ONNX node). The error of a layer is that of its operands and its own.

        Examples
        --------
        >>> import torch, fmtprop as fp
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(-1)), torch.ones(2, 8)
        >>> errors = fp.compile(model, x).compare(fp.compile(model, x, policy="plain"), [x])
        >>> [layer.op for layer in errors.layers], errors.results[0].max_error < 1e-6
        (['inner_product', 'softmax'], True)
        """
        from fmtprop.report.accuracy import compare

        return compare(self, other, data)

    def random_inputs(self, seed: int = 0) -> list[torch.Tensor]:
        """Return seeded random inputs that fit the model: normal for floats, 0 or 1 for integers and booleans."""
        return random_inputs(self.graph, seed)

    def report(self, repeats: int = 10) -> Report:
        """Measure the plan and return the cost and the reason of each reorder.

        Parameters
        ----------
        repeats : int
            Runs over which each step's median is taken.

        Raises
        ------
        InputError
            ``repeats`` is not a positive number.
        """
        from fmtprop.report import Report

        _check_repeats(repeats)
        return Report.of(self, repeats=repeats)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, threads: int | None) -> Any:
        is_flat = self._has_flat_inputs and not kwargs
        inputs = args if is_flat else flatten_arguments(self.graph.structure, args, kwargs)
        results = self._executor.run(inputs, out, threads)
        if self._has_flat_outputs:
            return results[0] if len(results) == 1 else tuple(results)
        return restructure(self.graph.structure, results)

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the graph's inputs as a call would take them, random ones for a call without arguments."""
        return flatten_arguments(self.graph.structure, args, kwargs) if args or kwargs else self.random_inputs()

    def _check_names(self, **given: bool) -> None:
        """Refuse a keyword that was given and may have been meant for the model."""
        for name, is_given in given.items():
            if is_given and name in self._arguments:
                raise InputError(
                    f"{self.graph.name}: {name}= is ambiguous, since the model has an argument called {name!r}: give "
                    "that by position"
                )

    def close(self) -> None:
        """Wait for submitted runs and release the native objects of idle contexts; the model can still be run.

        A better plan that is being made in the background is given up.
        """
        if self._improvement is not None:
            self._improvement.end()
        super().close()
        self._executor.close()

    def __copy__(self) -> CompiledModel:
        """Return a model with contexts of its own; the plan and the constants, which never change, are shared."""
        return CompiledModel(self.compilation)

    def _saved(self) -> Saved:
        from fmtprop.compiling.saving import Saved

        return Saved([self.compilation], self.options)

    def _repr_html_(self) -> str:
        """Return the plan as a picture for a notebook."""
        from fmtprop.report.graph_svg import graph_svg

        title = f"{self.graph.name}, policy {self.options.policy}, {self.precision}: {self._size()}"
        return f'<div style="overflow: auto; max-height: 40em">{graph_svg(self.graph, title)}</div>'

    def __repr__(self) -> str:
        return f"<CompiledModel {self.graph.name}: policy {self.options.policy}, {self.precision}, {self._size()}>"

    def _size(self) -> str:
        return f"{counted(len(self.plan.steps), 'step')}, {counted(len(self.plan.reorders), 'reorder')}"


def _check_repeats(repeats: int) -> None:
    if not isinstance(repeats, int) or not 1 <= repeats <= MAX_RUNS:
        raise InputError(f"repeats must be a whole number from 1 to {MAX_RUNS}, for a median, got {repeats!r}")


def _are_flat(graph: Graph) -> tuple[bool, bool]:
    """Whether arguments are plain positional tensors, and the result a tensor or a tuple of tensors, in graph order."""
    if not graph.structure:
        return True, True
    data = parsed(graph.structure)
    slots = [{"slot": i} for i in range(len(graph.input_nodes))]
    outs = [{"slot": i} for i in range(len(graph.output_nodes))]
    results = data["results"]
    single = len(outs) == 1 and results == outs[0]
    return (
        [spec for _, spec in data["positional"]] == slots and not data["keyword"],
        single or (len(outs) > 1 and results == {"tuple": outs}),
    )
