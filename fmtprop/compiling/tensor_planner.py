"""From a normal graph to a plan of PyTorch operators: the mkldnn target's counterpart of `planner`.

Owns the order: formats assigned by a policy, frozen, and each distinct operator checked once. Decides no format itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.errors import PlanError
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assign import AssignFormats
from fmtprop.passes.optimal import Certificate, OptimalFormats, resolve_pins
from fmtprop.passes.target import Setting
from fmtprop.runtime import Plan, build_plan
from fmtprop.runtime.constants import ConstantStore
from fmtprop.runtime.selfcheck import check_steps
from fmtprop.runtime.weights import PackedForms
from fmtprop.store import Store
from fmtprop.targets import ReferenceTarget
from fmtprop.targets.mkldnn import MkldnnCosts, MkldnnTarget
from fmtprop.targets.mkldnn.formats import opaque

__all__ = ["plan_tensors", "tensor_assigner"]


def plan_tensors(
    normal: Graph, options: Options, lap: Callable[[str], None], forms: PackedForms
) -> tuple[Graph, Plan, Certificate | None]:
    """Assign formats by the policy, and freeze the result.

    Parameters
    ----------
    normal : Graph
        A normal graph.
    options : Options
        How.
    lap : callable
        Told of each stage that ended.
    forms : PackedForms
        Takes note of the constants.

    Raises
    ------
    PlanError
        An operator gives another result than its reference.
    UnsupportedOpError
        Nobody can run an op, or a pin can't be obeyed.
    """
    formatted, certificate = _assign(normal, options)
    verify(formatted, Stage.FORMATTED)
    lap("assign")
    plan = build_plan(formatted, MkldnnTarget(), constants=ConstantStore(forms))
    lap("plan")
    if options.verify != "off":
        for mismatch in check_steps(plan.steps, Store(), plan.packed):
            raise PlanError(
                f"model {normal.name}: {mismatch}; report it with the model, and compile with policy='plain' meanwhile"
            )
    lap("check")
    return formatted, plan, certificate


def tensor_assigner(
    policy: str,
    boundary: Mapping[str, MemoryDesc] | None = None,
    pins: Mapping[str, MemoryDesc] | None = None,
    costs: MkldnnCosts | None = None,
) -> AssignFormats | OptimalFormats:
    """Return the pass that assigns formats for this target by a policy.

    Parameters
    ----------
    policy : str
        As :func:`fmtprop.compile` takes it.
    boundary : mapping of str to MemoryDesc, optional
        Format of graph inputs and outputs by name; a blocked one is that of an mkldnn tensor.
    pins : mapping of str to MemoryDesc, optional
        Formats that must be, for policy `optimal`.
    costs : MkldnnCosts, optional
        For policy `optimal`; by a model if not given.
    """
    formats = {name: desc if desc.is_plain else opaque(desc) for name, desc in (boundary or {}).items()}
    setting = Setting(MkldnnTarget(), ReferenceTarget(), formats, in_place=False, competing=False)
    if policy != OPTIMAL:
        return AssignFormats(policy, setting)
    return OptimalFormats(setting, costs or MkldnnCosts(), pins or {})


def _assign(normal: Graph, options: Options) -> tuple[Graph, Certificate | None]:
    """Return the formatted graph of a policy, and how good it is if the policy is `optimal`."""
    pins = resolve_pins(normal, options.pin)
    costs = MkldnnCosts(measure=options.measures, budget=options.tune_budget, progress=options.progress)
    assign = tensor_assigner(options.policy, options.boundary, pins, costs)
    if isinstance(assign, OptimalFormats):
        return assign.solve(normal)
    return assign.run(normal), None
