"""The end of a model that no plan can express: it runs node by node behind the plan of all other nodes.

A detector selects boxes at its end (NonMaxSuppression, NonZero), and how many depends on the numbers of a run. The
convolutions before have fixed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model.steps import NodeStep, reads


class Rest:
    """The nodes whose results no plan can have, and those that read such results, in the model's order.

    `reason`: why the first of them is in no plan.
    """

    def __init__(self, reason: ImportModelError) -> None:
        self.reason = reason
        self.steps: list[NodeStep] = []
        #: values of other nodes that they read, by name
        self.read: dict[str, Any] = {}
        #: the names of their results
        self.made: set[str] = set()

    def depends(self, step: NodeStep) -> bool:
        """Return whether a node reads a result of these nodes."""
        return not self.made.isdisjoint(reads(step))

    def add(self, step: NodeStep, values: Mapping[str, Any]) -> None:
        """Add a node; `values` has all that the other nodes before it have made."""
        self.steps.append(step)
        self.made |= set(filter(None, step.outputs))  # an output that is left out has no name
        self.read |= {name: values[name] for name in reads(step) if name in values}
