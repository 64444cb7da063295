"""Plans of bodies: a loop whose number of rounds depends on values runs round by round, and each round as a plan.

Owns when a body gets a plan, and which operands are constants. What a node means, :mod:`fmtprop.onnx.model` owns.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.from_graph import compile_graph
from fmtprop.compiling.options import Options
from fmtprop.errors import FmtpropError
from fmtprop.onnx.model.graph import Split, head_of
from fmtprop.onnx.model.program import OnnxProgram
from fmtprop.onnx.model.steps import Body

_LOG: Final = logging.getLogger("fmtprop")

#: rounds with operands of the same shapes after which a body gets a plan: it takes as long as some dozens of them
_ROUNDS: Final = 32

#: plans of one body, and bodies with counted rounds: functions of ONNX have others in each run
_MOST_PLANS, _MOST_BODIES = 4, 256

#: shapes and types of all operands
_Key = tuple[tuple[torch.Size, torch.dtype], ...]


@dataclass(frozen=True)
class _BodyPlan:
    """A body as a plan.

    `fixed`: operands that are constants, by position, which each round compares by identity. `varying`: positions of
    the plan's inputs. `kept`: of each result that a round gives as it got it, the operand's position; None for others.
    """

    net: CompiledModel
    split: Split | None
    program: OnnxProgram
    fixed: list[tuple[int, torch.Tensor]]
    varying: list[int]
    kept: list[int | None]

    def results(self, operands: Sequence[Any]) -> list[Any] | None:
        """Return the results of a round; None if a constant is another one."""
        if any(operands[place] is not constant for place, constant in self.fixed):
            return None
        made: Any = self.net.run_flat([operands[place] for place in self.varying])
        if self.split is not None:
            made = self.split.finish(self.program, made, owned=False)  # the loop's next round reads them
        computed = iter(made)
        return [next(computed) if place is None else operands[place] for place in self.kept]


@dataclass
class _Known:
    """A body, the names of outer values that it reads, its rounds by shapes, and its plans; None where it has none."""

    body: Body
    outer: list[str]
    rounds: Counter[_Key] = field(default_factory=Counter)
    plans: dict[_Key, _BodyPlan | None] = field(default_factory=dict)


class Bodies:
    """The bodies of a program's loops."""

    def __init__(self, program: OnnxProgram, options: Options) -> None:
        self._program, self._options = program, replace(options, confirm=False)
        #: by identity of the body, which is kept
        self._known: dict[int, _Known] = {}

    def results(self, body: Body, values: Sequence[Any], scope: Mapping[str, Any]) -> list[Any] | None:
        """Return the results of a round; None if it is to run node by node."""
        known = self._known.get(id(body))
        if known is None:
            if len(self._known) >= _MOST_BODIES:
                return None
            known = self._known[id(body)] = _Known(body, sorted(body.outer()))
        operands = [*values, *map(scope.get, known.outer)]
        if len(values) != len(body.inputs) or not all(type(one) is torch.Tensor for one in operands):
            return None
        key = tuple((one.shape, one.dtype) for one in operands)
        if key not in known.plans:
            known.rounds[key] += 1
            if known.rounds[key] < _ROUNDS or len(known.plans) >= _MOST_PLANS:
                return None
            known.plans[key] = self._made(known, operands)
        plan = known.plans[key]
        return None if plan is None else plan.results(operands)

    def _made(self, known: _Known, operands: Sequence[torch.Tensor]) -> _BodyPlan | None:
        body, names = known.body, [*known.body.inputs, *known.outer]
        held = set(map(id, self._program.body.held()))
        # what a round gives as it got it: weights of exporters that have all values among a loop's states
        places = {name: place for place, name in enumerate(body.inputs)}
        kept = [places.get(body.source_of(name)) for name in body.outputs]
        unchanging = {place for place in kept if place is not None} | set(range(len(body.inputs), len(names)))
        fixed = [(place, operands[place]) for place in sorted(unchanging) if id(operands[place]) in held]
        constants = {names[place]: tensor for place, tensor in fixed}
        varying = [place for place, name in enumerate(names) if name not in constants]
        given = {names[place]: operands[place] for place in varying}
        outputs = [name for name, place in zip(body.outputs, kept, strict=True) if place is None]
        program = self._program.of_body(body, given, constants, outputs)
        try:
            graph, split = head_of(program, {name: tuple(one.shape) for name, one in given.items()})
            net = compile_graph(graph, self._options)
        except FmtpropError as error:
            _LOG.info("the body of a loop, %s, has no plan: %s", body.name, error)
            return None
        return _BodyPlan(net, split, program, fixed, varying, kept)
