"""A model for sizes that change: a plan for each, made when it is first met. Plans nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fmtprop.compiling.buckets import Buckets, Given, Padding
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.compiling.plans import Plans
from fmtprop.compiling.serving import Serving
from fmtprop.compiling.shapes import Shapes
from fmtprop.errors import InputError
from fmtprop.frontends.torch_export import Exported
from fmtprop.ir.structure import flatten_arguments, restructure
from fmtprop.report import TOLERANCES
from fmtprop.runtime.agreement import relative_error
from fmtprop.system import collector

if TYPE_CHECKING:
    from fmtprop.report import Report


class DynamicModel(Serving):
    """A model that is planned for each shape that it is called with. Made by :func:`compile` with ``dynamic_shapes``.

    Parameters
    ----------
    exported : Exported
        The model, exported once.
    make : callable
        Compiles an imported graph, as :func:`fmtprop.api.compile_graph` does.
    options : Options
        How to compile. Plans are run against each other for the first shape alone. A similar shape takes the choices of
        a planned one, any other shape the cheapest plan by cost, so that a new shape does not take long.
    max_shapes : int
        Plans that are kept. The plan that was used longest ago goes first.
    buckets : mapping of str to mapping of int to sequence of int, optional
        Sizes that calls are padded to, by input and axis.
    """

    def __init__(
        self,
        exported: Exported,
        make: Callable[..., CompiledModel],
        options: Options,
        max_shapes: int,
        buckets: Given | None = None,
    ) -> None:
        super().__init__()
        self.name = exported.name
        self.max_shapes = max_shapes
        self._exported, self._make, self._options = exported, make, options
        program = exported.program
        tensors = (*program.state_dict.values(), *program.constants.values())
        self._shared = Shapes(tensors)
        self._plans: Plans[tuple[Any, ...], CompiledModel] = Plans(max_shapes)
        self._buckets = Buckets(program, buckets) if buckets else None
        #: padded shapes with which the model gave the same results as without padding
        self._agreed: set[tuple[tuple[int, ...], ...]] = set()
        self._structure = self._plan_for(self._in_buckets(exported.examples)).graph.structure
        self._options = replace(options, confirm=False)

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """The shapes of the inputs that have a plan, the plan that was used last at the end."""
        return list(self._plans)

    def __call__(self, *args: Any, out: torch.Tensor | Sequence[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the model, as :class:`CompiledModel` does; the first call with a shape plans for it.

        Raises
        ------
        InputError
            An input does not fit, or has a size that the model was not exported for.
        """
        if self._buckets is None:
            return self._run(args, kwargs, out, None)
        if out is not None:
            raise InputError(f"{self.name}: out= has the sizes of a bucket's results: compile without buckets")
        return self._run(args, kwargs, None, None)

    def plan_for(self, *args: Any, **kwargs: Any) -> CompiledModel:
        """Return the model that runs a call with these arguments, padded to their bucket; only their shapes are read.

        It has reports and profiles of its own. It stays valid when its place is taken by another shape.
        """
        return self._plan_for(self._in_buckets(flatten_arguments(self._structure, args, kwargs)))

    def report(self, *args: Any, repeats: int = 10, **kwargs: Any) -> Report:
        """Measure the plan of a call's shapes, and return the cost and the reason of each reorder.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the call; without any, the plan that was used last.
        repeats : int
            Runs over which each step's median is taken.
        """
        net = self.plan_for(*args, **kwargs) if args or kwargs else list(self._plans.values())[-1]
        return net.report(repeats=repeats)

    def warm_up(self, calls: Sequence[Any]) -> None:
        """Plan for shapes before they are met.

        Parameters
        ----------
        calls : sequence of tuple or dict
            The arguments of a call each: a tuple by position, a dict by name, or a single tensor.

        Raises
        ------
        InputError
            There are more shapes than plans are kept, or one does not fit.
        """
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

    def close(self) -> None:
        """Wait for submitted runs and release the native objects of idle contexts; the model can still be run."""
        super().close()
        for net in self._plans.values():
            net.close()

    def _stream(self) -> tuple[Callable[..., Any], str]:
        return lambda *args, **kwargs: self._run(args, kwargs, None, 1), self.name

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, threads: int | None) -> Any:
        inputs = flatten_arguments(self._structure, args, kwargs)
        padding = self._buckets.padding(inputs) if self._buckets is not None else None
        if padding is None:
            net = self._plan_for(inputs)
            return restructure(net.graph.structure, net._executor.run(inputs, out, threads))
        padded = padding.pad(inputs)
        net = self._plan_for(padded)
        results = padding.cut(net._executor.run(padded, None, threads))
        if padding.inputs not in self._agreed:
            self._compare(inputs, results, padding)
        return restructure(net.graph.structure, results)

    def _in_buckets(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        padding = self._buckets.padding(inputs) if self._buckets is not None else None
        return inputs if padding is None else padding.pad(inputs)

    def _compare(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], padding: Padding) -> None:
        """Compare the results of a padded call with those of a call without padding."""
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

    def _plan_for(self, inputs: Sequence[torch.Tensor]) -> CompiledModel:
        key = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in inputs)
        return self._plans.get(key, lambda: self._made(inputs))

    def _made(self, inputs: Sequence[torch.Tensor]) -> CompiledModel:
        with collector.paused():  # a pass over all of PyTorch's objects takes as long as a plan
            return self._make(self._exported.graph(inputs), self._options, shapes=self._shared)

    def __repr__(self) -> str:
        return f"<DynamicModel {self.name}: {len(self._plans)} of at most {self.max_shapes} shapes planned>"
