"""A model for sizes that change: a plan for each, made when it is first met. Plans nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.compiling.plans import Plans
from fmtprop.compiling.shapes import Shapes
from fmtprop.errors import InputError
from fmtprop.frontends.torch_export import Exported
from fmtprop.ir.structure import flatten_arguments, restructure
from fmtprop.system import collector

__all__ = ["DynamicModel"]


class DynamicModel:
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
    """

    def __init__(
        self,
        exported: Exported,
        make: Callable[..., CompiledModel],
        options: Options,
        max_shapes: int,
    ) -> None:
        self.name = exported.name
        self.max_shapes = max_shapes
        self._exported, self._make, self._options = exported, make, options
        program = exported.program
        tensors = (*program.state_dict.values(), *program.constants.values())
        self._shared = Shapes(tensors)
        self._plans: Plans[tuple[Any, ...], CompiledModel] = Plans(max_shapes)
        self._structure = self._plan_for(exported.examples).graph.structure
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
        inputs = flatten_arguments(self._structure, args, kwargs)
        net = self._plan_for(inputs)
        return restructure(net.graph.structure, net.run_flat(inputs, out))

    def plan_for(self, *args: Any, **kwargs: Any) -> CompiledModel:
        """Return the model that runs a call with these arguments; only their shapes are read.

        It has reports and profiles of its own. It stays valid when its place is taken by another shape.
        """
        return self._plan_for(flatten_arguments(self._structure, args, kwargs))

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
        """Release the native objects of idle contexts; the model can still be run."""
        for net in self._plans.values():
            net.close()

    def _plan_for(self, inputs: Sequence[torch.Tensor]) -> CompiledModel:
        key = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in inputs)
        return self._plans.get(key, lambda: self._made(inputs))

    def _made(self, inputs: Sequence[torch.Tensor]) -> CompiledModel:
        with collector.paused():  # a pass over all of PyTorch's objects takes as long as a plan
            return self._make(self._exported.graph(inputs), self._options, shapes=self._shared)

    def __repr__(self) -> str:
        return f"<DynamicModel {self.name}: {len(self._plans)} of at most {self.max_shapes} shapes planned>"
