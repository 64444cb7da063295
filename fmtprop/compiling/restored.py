"""A planned model from a plan file: the same implementations in the same formats, with the file's packed weights."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from fmtprop.compiling.findings import set_findings
from fmtprop.compiling.options import Options
from fmtprop.compiling.planned import Planned
from fmtprop.compiling.readable import graph_inside
from fmtprop.errors import FmtpropError, PlanError
from fmtprop.ir import Graph, Value
from fmtprop.ir.deferred import Deferred
from fmtprop.ir.file import producer_of
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.planfile.descs import at
from fmtprop.planfile.rebuild import NotOfferedError, is_built, rebuild
from fmtprop.planfile.rows import graph_of
from fmtprop.runtime.build import Draft
from fmtprop.runtime.constants import ConstantStore, computed_nodes
from fmtprop.runtime.selfcheck import check_steps
from fmtprop.runtime.weights import PackedForms, origin_of
from fmtprop.targets.memory import align

_KEYS = {
    "name": str, "structure": str, "nodes": list, "forms": list, "precision": str, "checked": bool, "choices": dict,
    "report": dict,
}  # fmt: skip


class Restored(Planned):
    """A planned model from a plan file.

    `row`: the plan in the document, of which nothing is trusted.
    """

    def __init__(self, row: Any, descs: Sequence[MemoryDesc], blocks: Sequence[torch.Tensor], options: Options) -> None:
        super().__init__(options, PackedForms())
        _check(row)
        choices = row["choices"]
        self.rewrite, self.is_like_another_shape = str(choices.get("rewrite")), bool(choices.get("alike"))
        self.precision, self.was_checked = row["precision"], row["checked"]
        self.formatted = graph_of(row["name"], row["structure"], row["nodes"], descs)
        set_findings(self, row["report"])
        self._flats = self._read_forms(row["forms"], descs, blocks)
        readers = self.weights.readers()
        for node in self.formatted.nodes():
            if node.op == "constant" and len(node.results) == 1 and node.descs:
                value, strides = Value(node.name), _strides(node.descs[0])
                make = readers.get(value) or self.weights.reader(value)
                self.formatted.constants[node.name] = Deferred(node.results[0], strides, make, fresh=True)

    def _read_forms(self, rows: Sequence[Any], descs: Sequence[MemoryDesc], blocks: Sequence[torch.Tensor]) -> Any:
        flats: dict[tuple[int, int], torch.Tensor] = {}
        for row in rows:
            origin, desc, block = _form(row, descs, blocks)
            if Value(origin.node) not in _values(self.formatted, origin.node) or align(desc.nbytes) != block[1].numel():
                raise PlanError(f"its packed form {str(row)[:80]} has the wrong size, or is of no node")
            key = block[0], desc.nbytes
            flat = flats.setdefault(key, block[1][: desc.nbytes])
            self.weights.note(origin, desc, flat)
        return flats

    def build(self) -> None:
        """Make the plan.

        Raises NotOfferedError if a target lacks an implementation here, and PlanError or GraphError if the graph breaks
        a rule.
        """
        verify(self.formatted, Stage.FORMATTED)
        computed = computed_nodes(self.formatted)
        names = computed | self._to_compute(computed)
        self.formatted = rebuild(self.formatted, self._target, self._fallback, names)
        self._target.forget()
        draft = Draft(self.formatted, self._target)
        if self._checked and not self.was_checked:
            self._check(draft)
        plan = draft.pack(ConstantStore(self.weights))
        self.plan = replace(plan, packed=draft.plan.packed)
        self.formatted.constants.clear()
        self._flats = None  # the plan has what it needs

    def inside(self) -> Graph:
        """Return the graph to plan it again."""
        return graph_inside(self.formatted, self.weights)

    def with_constants(self) -> Graph:
        """Return the formatted graph with constants that are read from packed forms when they are needed."""
        names = {node.name for node in self.formatted.nodes() if not is_built(node)}
        self.formatted = rebuild(self.formatted, self._target, self._fallback, names)
        return super().with_constants()

    def _to_compute(self, computed: Collection[str]) -> set[str]:
        """Return the nodes on constants whose results are not in the file."""
        graph, found = self.formatted, set()
        waiting = [value for name in computed for value in graph.inputs(name).values() if value.node not in computed]
        while waiting:
            value = waiting.pop()
            node = graph.node(value.node)
            if node.name in found or node.op == "constant":
                continue
            if self.weights.find(origin_of(graph, value), graph.desc_of(value)) is not None:
                continue
            found.add(node.name)
            waiting += graph.inputs(node.name).values()
        return found

    def _check(self, draft: Draft) -> None:
        wrong = check_steps(draft.plan.steps, self._store)
        for mismatch in wrong:
            warnings.warn(f"{mismatch}; the plan is made again without it", RuntimeWarning, stacklevel=2)
        if wrong:
            raise NotOfferedError(f"{len(wrong)} of its primitives give wrong results here")


def _strides(desc: MemoryDesc) -> tuple[int, ...]:
    return desc.strides if desc.is_plain else ()


def _values(graph: Graph, name: str) -> set[Value]:
    return {Value(name)} if name in graph else set()


def _check(row: Any) -> None:
    if not isinstance(row, dict) or set(row) != set(_KEYS):
        raise PlanError(f"a plan of its document must have the keys {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if not isinstance(row[key], kind):
            raise PlanError(f"{key} of a plan of its document must be {kind.__name__}")


def _form(
    row: Any, descs: Sequence[MemoryDesc], blocks: Sequence[torch.Tensor]
) -> tuple[Value, MemoryDesc, tuple[int, torch.Tensor]]:
    if not isinstance(row, list) or len(row) != 3:
        raise PlanError(f"its packed form {str(row)[:80]} must be an origin, a format and a block")
    try:
        origin = Value(*producer_of("its packed form", row[0]))
    except FmtpropError as error:
        raise PlanError(str(error)) from error
    desc, block = at(descs, row[1], "format"), at(blocks, row[2], "block of weights")
    if not desc.takes_any_bytes or desc.kind != "blocked":
        raise PlanError(f"its packed form {str(row)[:80]} is in a format that a file cannot have")
    return origin, desc, (row[2], block)
