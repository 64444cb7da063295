"""A model for sizes that change: a plan for each, made when it is first met. Plans nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from fmtprop.compiling.ahead import cases
from fmtprop.compiling.buckets import Buckets, Given, Padding
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.compiling.plans import Plans
from fmtprop.compiling.saveable import Saveable
from fmtprop.compiling.serving import Serving
from fmtprop.errors import InputError
from fmtprop.ir.structure import flatten_arguments, restructure
from fmtprop.runtime.agreement import relative_error
from fmtprop.runtime.arenas import GROWTH, Arenas
from fmtprop.runtime.threads import running_with
from fmtprop.system import collector

if TYPE_CHECKING:
    from fmtprop.compiling.program import SharedProgram
    from fmtprop.compiling.saving import Saved
    from fmtprop.report import Report


class DynamicModel(Serving, Saveable):
    """A model that is planned for each shape that it is called with. Made by :func:`compile` with ``dynamic_shapes``.

    Parameters
    ----------
    name : str
        Name of the model.
    program : callable
        Returns the model's program; called when a shape has no plan.
    options : Options
        How to compile. Plans are run against each other for the first shape alone. A similar shape takes the choices of
        a planned one, any other shape the cheapest plan by cost, so that a new shape does not take long.
    max_shapes : int
        Plans that are kept. With so many, PyTorch runs another shape until its third call; then it takes the place of
        the plan that was used longest ago (at its first call with ``deterministic=True``, codes for weights, `out`).
    buckets : mapping of str to mapping of int to sequence of int, optional
        Sizes that calls are padded to, by input and axis.
    nets : sequence of CompiledModel
        Plans that there are already; without one, the shape of the program's examples is planned.
    """

    def __init__(
        self,
        name: str,
        program: Callable[[], SharedProgram],
        options: Options,
        max_shapes: int,
        buckets: Given | None = None,
        nets: Sequence[CompiledModel] = (),
    ) -> None:
        super().__init__()
        self.name, self.options, self.max_shapes = name, options, max_shapes
        self._program, self._given = cache(program), buckets
        self._plans: Plans[tuple[Any, ...], CompiledModel] = Plans(max_shapes)
        #: padded shapes with which the model gave the same results as without padding
        self._agreed: set[tuple[tuple[int, ...], ...]] = set()
        for net in nets:
            self._plans.add(tuple(node.results[0].dims for node in net.graph.input_nodes), net)
        if not nets:
            self.plan_flat(self._in_buckets(self._program().exported.examples))
        self._structure = self.plans[0].graph.structure

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """The shapes of the inputs that have a plan, the plan that was used last at the end."""
        return list(self._plans)

    @property
    def plans(self) -> list[CompiledModel]:
        """The models of these shapes, in the same order."""
        return self._plans.values()

    def __call__(self, *args: Any, out: torch.Tensor | Sequence[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the model, as :class:`CompiledModel` does; the first call with a shape plans for it.

        Raises
        ------
        InputError
            An input does not fit, or has a size that the model was not exported for.
        """
        if out is not None and self._given:
            raise InputError(f"{self.name}: out= has the sizes of a bucket's results: compile without buckets")
        return self._run(args, kwargs, out, None)

    def plan_for(self, *args: Any, **kwargs: Any) -> CompiledModel:
        """Return the model that runs a call with these arguments, padded to their bucket; only their shapes are read.

        Without arguments, the one that was used last. It has reports and profiles of its own. It stays valid when its
        place is taken by another shape.
        """
        if not args and not kwargs:
            return self.plans[-1]
        return self.plan_flat(self._in_buckets(flatten_arguments(self._structure, args, kwargs)))

    def report(self, *args: Any, repeats: int = 10, **kwargs: Any) -> Report:
        """Measure the plan of a call's shapes; return the cost and the reason of each reorder.

        The report's model has the sizes of these shapes.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the call; without any, the plan that was used last.
        repeats : int
            Runs over which each step's median is taken.
        """
        net = self.plan_for(*args, **kwargs)
        return replace(net.report(repeats=repeats), model=f"{self.name}, {_sizes(net)}")

    def warm_up(self, calls: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None) -> None:
        """Plan for shapes before they are met.

        Parameters
        ----------
        calls : mapping or sequence, optional
            Sizes by input: ``{"x": (1, 3, (320, 640, 32), [256, 512])}`` has a plan for each combination, from 320 to
            640 in steps of 32, and of the two widths. Or the arguments of a call each: a tuple by position, a dict by
            name, or a single tensor. Default: all combinations of the buckets' sizes.

        Raises
        ------
        InputError
            There are more shapes than plans are kept, or one does not fit.
        """
        if calls is None or isinstance(calls, Mapping):
            self._warm_up_sizes(calls)
            return
        if not isinstance(calls, list | tuple):
            raise InputError(
                f"{self.name}: warm_up takes sizes by input or a list of calls, got {type(calls).__name__}"
            )
        if len(calls) > self.max_shapes:
            raise InputError(
                f"{self.name}: warm_up of {len(calls)} shapes, but max_shapes is {self.max_shapes}, so the first "
                "would be lost: compile with a larger max_shapes"
            )
        for call in calls:
            if isinstance(call, Mapping):
                self.plan_for(**call)
            else:
                self.plan_for(*(call if isinstance(call, tuple | list) else (call,)))

    def _warm_up_sizes(self, given: Mapping[str, Sequence[Any]] | None) -> None:
        from fmtprop.capture.specialise import Sizes  # PyTorch's exporter, which loaded plans do without

        exported = self._program().exported
        if given is None and self._buckets is None:
            raise InputError(f"{self.name}: without buckets, warm_up needs the sizes or the calls to plan for")
        if given is None and self._buckets is not None:
            given = self._buckets.sizes(exported.examples)
        inputs = Sizes(exported.program).inputs
        declared = [(name, [s if isinstance(s, int) else str(s) for s in value.shape]) for name, value in inputs]
        for case in cases(given, declared, self.max_shapes):
            types = (value.dtype for _, value in inputs)
            self.plan_flat([torch.empty(dims, dtype=t, device="meta") for dims, t in zip(case, types, strict=True)])

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for better plans that are being made in the background; return whether the present ones stay.

        Parameters
        ----------
        timeout : float, optional
            The most seconds to wait for each.
        """
        return all([net.settle(timeout) for net in self._plans.values()])

    def close(self) -> None:
        """Wait for submitted runs and release the native objects of idle contexts; the model can still be run."""
        super().close()
        for net in self.plans:
            net.close()

    def _stream(self) -> tuple[Callable[..., Any], str]:
        return lambda *args, **kwargs: self._run(args, kwargs, None, 1), self.name

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, threads: int | None) -> Any:
        inputs = flatten_arguments(self._structure, args, kwargs)
        padding = self._padding(inputs)
        if padding is None:
            if out is None and self._is_rare(inputs):
                return restructure(self._structure, self._in_pytorch(inputs, threads))
            net = self.plan_flat(inputs)
            return restructure(net.graph.structure, net._executor.run(inputs, out, threads))
        padded = padding.pad(inputs)
        net = self.plan_flat(padded)
        results = padding.cut(net._executor.run(padded, None, threads))
        if padding.inputs not in self._agreed:
            self._compare(inputs, results, padding)
        return restructure(net.graph.structure, results)

    def _is_rare(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether PyTorch is to run a call, since plans of other shapes take all places."""
        if self.options.plans_all or (key := _key(inputs)) in self._plans or not self._plans.is_full:
            return False
        return self._program().exported.gives_tensors and self._plans.is_rare(key)

    def _in_pytorch(self, inputs: Sequence[torch.Tensor], threads: int | None) -> list[torch.Tensor]:
        program = self._program().exported.of(inputs)
        start = time.thread_time()
        with nullcontext() if threads is None else running_with(threads):
            results = program.run(inputs)
        self._plans.note_run(time.thread_time() - start)
        return results

    @cached_property
    def _buckets(self) -> Buckets | None:
        return Buckets(self._program().exported.program, self._given) if self._given else None

    def _padding(self, inputs: Sequence[torch.Tensor]) -> Padding | None:
        """Return the padding of a call, None where its shapes have a plan or need none."""
        if not self._given or _key(inputs) in self._plans or self._buckets is None:
            return None
        return self._buckets.padding(inputs)

    def _in_buckets(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        padding = self._padding(inputs)
        return inputs if padding is None else padding.pad(inputs)

    def _compare(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], padding: Padding) -> None:
        """Compare the results of a padded call with those of a call without padding."""
        from fmtprop.report import TOLERANCES

        exact = self._made(inputs)
        for place, (got, expected) in enumerate(zip(results, exact.run_flat(inputs), strict=True)):
            error = relative_error(got, expected)
            if error > TOLERANCES[exact.precision]:
                raise InputError(
                    f"{self.name}: result {place} differs by {error:.1e} when the inputs are padded with zeros to "
                    f"{list(padding.inputs)}, so this model takes no buckets: mask what is padded, or compile without "
                    "buckets"
                )
        self._agreed.add(padding.inputs)

    def plan_flat(self, inputs: Sequence[torch.Tensor]) -> CompiledModel:
        """Return the model that runs the graph's inputs of these shapes."""
        return self._plans.get(_key(inputs), lambda: self._made(inputs))

    def _made(self, inputs: Sequence[torch.Tensor]) -> CompiledModel:
        from fmtprop.compiling.from_graph import compile_graph  # all of a compilation, which loaded plans do without

        program, is_first = self._program(), not len(self._plans)
        options = self.options if is_first else replace(self.options, confirm=False)
        with collector.paused():  # a pass over all of PyTorch's objects takes as long as a plan
            return compile_graph(program.exported.graph(inputs), options, shapes=program.shapes)

    def _saved(self) -> Saved:
        from fmtprop.compiling.saving import Saved

        given = (self._given or {}).items()
        buckets = {name: {str(axis): list(sizes) for axis, sizes in axes.items()} for name, axes in given}
        extra = {"max_shapes": self.max_shapes, "buckets": buckets}
        return Saved([net.compilation for net in self.plans], self.options, self._program(), extra)

    def __copy__(self) -> DynamicModel:
        """Return a model with contexts of its own; the plans and the constants, which never change, are shared."""
        arenas = Arenas(growth=GROWTH)
        nets = [CompiledModel(net.compilation, arenas) for net in self.plans]
        return DynamicModel(self.name, self._program, self.options, self.max_shapes, self._given, nets)

    def __repr__(self) -> str:
        return f"<DynamicModel {self.name}: {len(self._plans)} of at most {self.max_shapes} shapes planned>"

    def _repr_html_(self) -> str:
        """Return the plan that was used last as a picture for a notebook, with the sizes of all."""
        from fmtprop.report.html import fragment

        rows = [(_sizes(net), str(len(net.plan.steps)), str(len(net.plan.reorders))) for net in self.plans]
        return fragment(repr(self), (), ("inputs", "steps", "reorders"), rows) + self.plans[-1]._repr_html_()


def _sizes(net: CompiledModel) -> str:
    """Return the sizes of each input of a plan.

    >>> from fmtprop.compiling.from_graph import compile_graph
    >>> from fmtprop.capture import load
    >>> _sizes(compile_graph(load("chain"), Options(tune="model")))
    'input 1x3x32x32'
    """
    return ", ".join(f"{node.name} {'x'.join(map(str, node.results[0].dims))}" for node in net.graph.input_nodes)


def _key(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in inputs)
