"""The formatted graph of a solution: the chosen nodes and reorders, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fmtprop.errors import PassError
from fmtprop.ir import Graph, Node, Value
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.assign import AssignFormats, Assignment, Placed
from fmtprop.passes.assignment.formats import describe
from fmtprop.passes.editing import unused_name
from fmtprop.passes.optimal.composition import Composition
from fmtprop.passes.optimal.problem import Problem, Solution
from fmtprop.passes.optimal.ways import Way
from fmtprop.passes.precision.in_bytes import reads_bytes, why_in_floats
from fmtprop.passes.target import Candidate


def realise(graph: Graph, problem: Problem, solution: Solution, spec: AssignFormats, baseline: Graph) -> Graph:
    """Return the formatted graph of a solution.

    `baseline`: its result for the graph; it has the reason if there is only one way to run a node.
    """
    return _Realisation(graph, problem, solution, spec, baseline).run()


class _Realisation(Assignment):
    """An assignment with decisions made before."""

    def __init__(
        self, graph: Graph, problem: Problem, solution: Solution, spec: AssignFormats, baseline: Graph
    ) -> None:
        super().__init__(spec, graph)
        self.chosen: dict[str, Way] = {}
        self.reasons: dict[str, str] = {}
        #: nodes that run as part of a later one
        self.absorbed: set[str] = set()
        offered: dict[str, list[Candidate]] = {}
        for alternative in problem.alternatives:
            way: Way = alternative.payload
            offered.setdefault(way.node.name, []).append(way.candidate)
        for index in solution.chosen:
            way = problem.alternatives[index].payload
            self.chosen[way.node.name] = way
            self.absorbed.update(way.covers[:-1])
            name = way.node.name
            greedy = baseline.node(name) if name in baseline else None
            reason = _reason(way.candidate, offered[name], greedy, spec.setting.target.name)
            in_bytes = [other.cost for other in offered[name] if reads_bytes(other)]
            self.reasons[name] = reason + why_in_floats(way.node, way.candidate, spec.setting, in_bytes)
        #: (tensor, wanted format) -> source format of the conversion
        self.sources: dict[tuple[Value, MemoryDesc], MemoryDesc] = {}
        for value, pairs in solution.conversions.items():
            for src, dst in pairs:
                # for the solver, they are any hashable objects
                if isinstance(value, Value) and isinstance(src, MemoryDesc) and isinstance(dst, MemoryDesc):
                    self.sources[value, dst] = src
        #: composition -> its values that depend on no operand: all nodes that it replaces share them
        self.fixed: dict[int, dict[Value, Value]] = {}
        #: value of the new graph -> value of the normal graph
        self.names: dict[Value, Value] = {}

    def _visit(self, node: Node) -> None:
        if node.name in self.absorbed:
            return
        way = self.chosen.get(node.name)
        if way is None:
            super()._visit(node)
            return
        candidate = way.candidate
        inputs = {
            name: self._convert(self.tensors[value], candidate.operands[name], way.node, name)
            for name, value in way.inputs.items()
        }
        if isinstance(candidate.handle, Composition):
            self._compose(way.node, inputs, candidate.handle)
        else:
            self._place(way.node, inputs, candidate.results, candidate.choice(self.reasons[node.name]))
        for index in range(len(node.results)):
            self.names[Value(node.name, index)] = Value(node.name, index)

    def _compose(self, node: Node, inputs: Mapping[str, Value], composition: Composition) -> None:
        """Add the nodes that replace one node; the last has its name, the others names that begin with it."""
        fixed = self.fixed.setdefault(id(composition), {})
        places = {**fixed, **{composition.operands[name]: value for name, value in inputs.items()}}
        reason = f"part of {node.name}, {self.reasons[node.name]}"
        for part in composition.nodes:
            if Value(part.name) in fixed:
                continue
            read = composition.graph.inputs(part.name)
            operands = {name: places[value] for name, value in read.items()}
            last = part.name == composition.result.node
            stem = f"{node.name}.{part.name.rpartition('.')[2]}"
            name = node.name if last else stem
            if not last and (name in self.out or name in self.source):
                name = unused_name(stem, self.out, self.source)
            choice = replace(part.choice, reason=reason) if part.choice is not None else None
            marked = part.with_(name=name, choice=choice, origin=node.origin)
            if len(part.post_ops) == len(node.post_ops):  # equal nodes of other places share the composition
                tail = zip(part.post_ops, node.post_ops, strict=True)
                marked = marked.with_(post_ops=tuple(replace(one, origin=own.origin) for one, own in tail))
            if last and "dst" in node.grids:
                marked = marked.with_(grids={"dst": node.grids["dst"]})
            values = self.out.add(marked, operands)
            made = {Value(part.name, index): value for index, value in enumerate(values)}
            places.update(made)
            if fixed.keys() >= set(read.values()):
                fixed.update(made)
            if part.op == "constant":
                self.out.constants[name] = composition.graph.constants[part.name]
        value = Value(node.name)
        self.tensors[value] = Placed(value, self.out.desc_of(value))

    def _convert(self, tensor: Placed, wanted: MemoryDesc, reader: Node, operand: str) -> Value:
        """Return the tensor in the wanted format, by the solution's reorders."""
        value = tensor.value
        if value not in self.names:
            return super()._convert(tensor, wanted, reader, operand)
        if self.out.desc_of(value) == wanted:
            return value
        copy = self.copies.get((value, wanted))
        if copy is None:
            before = self.sources.get((value, wanted))
            if before is None:
                raise PassError(
                    f"pass optimal: {reader.name}.{operand} reads {value} as {describe(wanted)}, which the solution "
                    "does not make; report it with the model"
                )
            source = self._convert(tensor, before, reader, operand)
            copy = self.copies[value, wanted] = self._reorder(source, wanted, reader, operand)
        return copy


def _reason(candidate: Candidate, offered: list[Candidate], greedy: Node | None, main: str) -> str:
    """Return the reason of a choice: the compared costs in microseconds, or the greedy assignment's reason."""
    if candidate.target == "view":
        return "view: no data moves" if candidate.impl == "view" else "in place: the sources lie where they belong"
    others = [other for other in offered if other is not candidate]
    if not others:
        choice = greedy.choice if greedy is not None else None
        # the reason of the boundary, or of another target
        told = choice is not None and choice.target == candidate.target != main
        return choice.reason if choice is not None and told else "the only way to run it"
    cheapest = min(offered, key=lambda other: other.cost)
    note = f"{candidate.cost * 1e6:.0f} us"
    if cheapest is not candidate and cheapest.cost < candidate.cost:
        more = round((candidate.cost - cheapest.cost) * 1e6)
        rival = f"{cheapest.impl}{' in other formats' if cheapest.impl == candidate.impl else ''}"
        note += f", {more if more else 'less than 1'} us more than {rival} alone, less in all"
    return f"optimal among {len(offered)} ways: {note}"
