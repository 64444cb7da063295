"""What a compiled model has of its compilation: the formatted graph, the plan, and the plans for other threads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from fmtprop.compiling.options import Options
from fmtprop.compiling.race import Race
from fmtprop.compiling.readable import with_constants
from fmtprop.errors import PlanError, UnsupportedOpError
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.passes.assignment.for_threads import ForThreads
from fmtprop.passes.optimal import Certificate
from fmtprop.runtime import Plan, build_plan
from fmtprop.runtime.constants import ConstantStore
from fmtprop.runtime.selfcheck import Mismatch, check_steps
from fmtprop.runtime.threads import on_cpu, running_with
from fmtprop.runtime.weights import PackedForms
from fmtprop.store import Store
from fmtprop.system.printable import counted
from fmtprop.targets import ReferenceTarget
from fmtprop.targets.executable import Targets, implementation
from fmtprop.targets.registry import provider
from fmtprop.tuning import Basis, Tuning

#: how often a model is planned again after a failed check of its plan
ATTEMPTS = 5


class Planned:
    """A planned model, from a compilation or from a plan file.

    `owned`: whether nothing else has the graph's constants.
    """

    formatted: Graph
    plan: Plan

    def __init__(self, options: Options, weights: PackedForms, *, owned: bool = False) -> None:
        self.options, self.weights, self.owned = options, weights, owned
        self.is_like_another_shape = False
        #: name of the rewrite of the whole graph before formats were chosen; empty without one
        self.rewrite = ""
        self.precision = options.dtype
        self.certificate: Certificate | None = None
        self.race: Race | None = None
        self.tuning: Tuning | None = None
        #: of the costs by which the plan was chosen, in this process
        self.basis: Basis | None = None
        self.wrong: list[Mismatch] = []
        self.dropped: Mapping[str, str] = {}
        self.left_out: Mapping[str, str] = {}
        self.seconds: dict[str, float] = {}
        self._target, self._fallback = provider(options.target)(), ReferenceTarget()
        self._store = Store()
        self._checked = options.verify != "off"

    def plan_for(self, threads: int) -> Plan:
        """Make the plan for another number of threads: in the same formats, by primitives that are chosen anew."""
        targets = Targets()
        renewed = ForThreads(lambda node: targets.of(implementation(node)), self._fallback)
        name = self.formatted.name
        with running_with(threads), on_cpu(), torch.autocast("cpu", enabled=False):
            for _ in range(ATTEMPTS):
                try:
                    graph = renewed.run(self.with_constants())
                except UnsupportedOpError as error:
                    warnings.warn(
                        f"model {name} keeps running with {counted(self.plan.threads, 'thread')}: {error}; compile it "
                        f"again with {threads}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    return self.plan
                verify(graph, Stage.FORMATTED)
                plan = build_plan(graph, self._target, consume=self.owned, constants=ConstantStore(self.weights))
                wrong = check_steps(plan.steps, self._store, plan.packed) if self._checked else []
                if not wrong:
                    return plan
                for mismatch in wrong:
                    warnings.warn(f"{mismatch}; choosing another implementation", RuntimeWarning, stacklevel=2)
                    targets.reject(mismatch.node)
        raise PlanError(
            f"model {name}: primitives for {counted(threads, 'thread')} keep failing their check; the last: {wrong[0]}"
        )

    def with_constants(self) -> Graph:
        """Return the formatted graph with constants that are read from packed forms when they are needed.

        Where only products of a constant are left, these are constants.

        ``fmtprop.save(net.compilation.with_constants(), "plan.onnx")`` shows a plan in viewers of ONNX models.
        """
        return with_constants(self.formatted, self.weights)
