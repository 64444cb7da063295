"""The formats and implementations of a graph for another graph of the same model, with other sizes.

A model has a graph for each shape of its inputs. The new graph is walked as any greedy policy walks it, and each node
takes what the node of its name has in the other shape's formatted graph. A node that cannot have it for its sizes gets
the cheapest way in these formats, alone. The other graph is advice: what is computed comes from the new graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from math import inf

from fmtprop.errors import FormatError, PassError
from fmtprop.ir import Attrs, Category, Choice, Graph, Grid, Node, Role, TensorType, Value, opdef, ports, result_names
from fmtprop.ir.node import NO_GRIDS
from fmtprop.layout import MemoryDesc
from fmtprop.layout.parts import in_place_parts
from fmtprop.ops.concat import Concat
from fmtprop.passes.assignment.assign import AssignFormats, Assignment, Placed
from fmtprop.passes.assignment.formats import like, unspecified
from fmtprop.passes.assignment.identities import Forms, Identities, rounded
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import unused_name
from fmtprop.passes.target import Candidate, Costs, Request, Setting, free_request

#: from the last of several nodes to one node that replaces them, its operands, and their names
Fusion = Callable[[Graph, Node], "tuple[Node, dict[str, Value], tuple[str, ...]] | None"]

#: implementations of a request that a local choice compares: the library's first ones are its fastest
_COMPARED = 3

#: of a constant that is packed already
_PACKED = Choice("boundary", "constant", {}, "as another shape's plan has it")

#: share of the compute-intensive nodes that may choose for themselves; beyond it, the whole graph is solved anew
_MOST_LOCAL = 0.5


@dataclass(frozen=True)
class SameChoices(Pass):
    """Assign the formats and implementations of another shape's graph.

    Requires a normal graph, returns a formatted one. It raises PassError where the graphs have other inputs or outputs,
    or where most compute-intensive nodes would have to choose for themselves.
    """

    #: the formatted graph of another shape
    formatted: Graph
    setting: Setting
    #: costs of local choices, and those that reports show
    costs: Costs
    #: replacements of several nodes by one that an assignment may have chosen
    fusions: Sequence[Fusion] = ()
    #: the packed constants of other plans: where a node may read its constants so, they are constants of this graph
    forms: Forms | None = None
    #: whether the other graph's implementations are for another number of threads
    renews: bool = False
    #: node -> the request by which its implementation was found for a third shape; this shape's are added
    requests: dict[str, int] = field(default_factory=dict, compare=False)

    def run(self, graph: Graph) -> Graph:
        """Return the formatted graph."""
        try:
            return _Transfer(self, graph).run()
        except FormatError as error:
            raise PassError(f"pass {self.name}: {error}") from error


class _Transfer(Assignment):
    """A greedy walk whose policy is another shape's graph."""

    def __init__(self, spec: SameChoices, graph: Graph) -> None:
        super().__init__(AssignFormats("propagate", spec.setting), graph)
        self.costs, self.formatted, self.renews = spec.costs, spec.formatted, spec.renews
        self.requests = spec.requests
        #: node -> the node that computes it and others, its operands, and the nodes that it computes
        found = {node.name: fusion_for(graph, node, spec.formatted, spec.fusions) for node in graph.nodes()}
        self.fused = {name: fusion for name, fusion in found.items() if fusion is not None}
        #: nodes that wait for the last one of their fusion
        self.waiting = {name for _, _, covers in self.fused.values() for name in covers[:-1]}
        #: the other graph's implementations of changes of format; those of weights are the same for all shapes
        self.reorders = {
            (node.attrs, *node.choice.operands.values(), *node.descs): node.choice
            for node in spec.formatted.nodes()
            # what another process chose has no implementation here, but its identity
            if node.op == "reorder" and node.choice is not None and not isinstance(node.choice.handle, Mapping)
        }
        self.forms = forms = spec.forms
        self.numbers = None if forms is None else Identities(graph, forms.numbers, forms.computed)
        #: constants, and what is made of them: they are placed where a node reads them, if they are not packed yet
        self.fixed = frozenset() if forms is None else {node.name for node in graph.nodes()} - graph.dependents()
        #: constant value, format, grid -> the constant that is packed so
        self.packed: dict[object, Placed | None] = {}
        #: the node that was asked about last, and the other graph's node with its choice
        self.advised: tuple[Node | None, tuple[Node, Choice] | None] = None, None
        #: node without its name, request, choice -> the answer to equal nodes
        self.known: dict[object, Candidate | None] = {}
        #: identity of such an answer -> the answer, and its cost
        self.priced: dict[int, tuple[Candidate, float]] = {}
        #: compute-intensive nodes, and those of them that chose for themselves
        self.compute, self.local = 0, 0

    def run(self) -> Graph:
        for mine, others in (
            (self.source.input_nodes, self.formatted.input_nodes),
            (self.source.output_nodes, self.formatted.output_nodes),
        ):
            if [node.name for node in mine] != [node.name for node in others]:
                raise PassError(f"graph {self.source.name} has other inputs or outputs than the other shape's")
        out = super().run()
        if self.local > _MOST_LOCAL * self.compute:
            raise PassError(f"{self.local} of {self.compute} compute-intensive nodes cannot run as for the other shape")
        return out

    # ------------------------------------------------------------------ kinds of node

    def _visit(self, node: Node) -> None:
        if node.name in self.waiting:
            return
        if node.name in self.fixed:
            if node.op == "output":  # a result that no input changes
                self._operands(node)
                super()._visit(node)
            return
        fusion = self.fused.get(node.name)
        if fusion is None:
            super()._visit(node)
            return
        one, inputs, covers = fusion
        if self._settled_alike(one, inputs):
            return
        for name in covers:
            super()._visit(self.source.node(name))

    def _view_formats(self, node: Node, tensor: Placed) -> Iterable[MemoryDesc]:
        usual = super()._view_formats(node, tensor)
        wanted = [moved for moved in self._wanted(node, {"src": tensor}).values() if moved.dtype is tensor.desc.dtype]
        return (*wanted, *usual)

    def _visit_op(self, node: Node) -> None:
        is_compute = opdef(node.op).category is Category.COMPUTE
        self.compute += is_compute
        inputs = self.source.inputs(node.name)
        if self._settled_alike(node, inputs):
            return
        self.local += is_compute
        if self._settled_repacked(node, inputs):
            return
        tensors = self._operands(node)
        candidate, reason = self._local(node, tensors), "the other shape's way is impossible: cheapest by itself"
        if candidate is None:
            candidate, reason = self._decide(node, {name: tensor.desc for name, tensor in tensors.items()})
        self._settle(node, tensors, candidate, reason)

    def _settled_alike(self, node: Node, inputs: Mapping[str, Value]) -> bool:
        """Give a node the other graph's way, with constants as packed for it; return whether that is possible."""
        for find in (self._with_packed, self._placed):
            tensors = find(node, inputs)
            if tensors is None:
                continue
            candidate = self._in_place(node, tensors) or self._same(node, tensors)
            if candidate is not None:
                self._settle(node, tensors, candidate, "as for another shape")
                return True
        return False

    def _settled_repacked(self, node: Node, inputs: Mapping[str, Value]) -> bool:
        """Give a node the other graph's way with constants packed otherwise; return whether that is possible."""
        tensors = self._with_packed(node, inputs) or self._placed(node, inputs)
        candidate = self._same(node, tensors, repacking=True)
        if candidate is None or any(inputs[name].node not in self.fixed for name in _parameters(node, inputs)):
            return False
        tensors = self._with_packed(node, inputs, candidate.operands) or self._placed(node, inputs)
        self._settle(node, tensors, candidate, "as for another shape, constants packed for this one")
        return True

    # ------------------------------------------------------------------ constants

    def _operands(self, node: Node) -> dict[str, Placed]:
        return self._placed(node, self.source.inputs(node.name))

    def _placed(self, node: Node, inputs: Mapping[str, Value]) -> dict[str, Placed]:
        """Return the tensors of a node's operands, with all that makes them of constants."""
        for value in inputs.values():
            if value not in self.tensors:
                for one in self.source.nodes({value.node, *self.source.ancestors(value.node)}):
                    if Value(one.name) not in self.tensors:
                        super()._visit(one)
        return {name: self.tensors[value] for name, value in inputs.items()}

    def _with_packed(
        self, node: Node, inputs: Mapping[str, Value], read: Mapping[str, MemoryDesc] | None = None
    ) -> dict[str, Placed] | None:
        """Return the tensors of operands, constants as packed in the formats to read; None where none is packed so.

        `read`: as the other graph's node reads them by default.
        """
        if read is None:
            advice = self._advice(node)
            if advice is None:
                return None
            read = advice[1].operands
        known = {}
        for name, value in inputs.items():
            if value.node in self.fixed and name in read:
                packed = self._packed(value, read[name], node.grids.get(name))
                if packed is not None:
                    known[name] = packed
        if not known:
            return None
        others = self._placed(node, {name: value for name, value in inputs.items() if name not in known})
        return {name: known.get(name) or others[name] for name in inputs}

    def _packed(self, value: Value, desc: MemoryDesc, grid: Grid | None) -> Placed | None:
        """Return a constant value in a format that another plan has it in; None where none has it so."""
        key = value, desc, grid
        if key not in self.packed:
            self.packed[key] = self._packed_once(value, desc, grid)
        return self.packed[key]

    def _packed_once(self, value: Value, desc: MemoryDesc, grid: Grid | None) -> Placed | None:
        type_, numbers = self.source.type_of(value), self.numbers and self.numbers.of(value)
        if numbers is None or self.forms is None or type_.dims != desc.dims:
            return None
        data = self.forms.packed(rounded(numbers, type_.dtype, desc.dtype, grid), desc)
        if data is None:
            return None
        name, origin = unused_name(f"{value.node}.packed", self.out, self.source), self.source.node(value.node).origin
        grids = NO_GRIDS if grid is None else {"dst": grid}
        node = Node(name, "constant", Attrs(), (data.type_,), (), (desc,), _PACKED, origin, grids=grids)
        self.out.constants[name] = data
        return Placed(self.out.add(node, {})[0], desc)

    def _settle(self, node: Node, tensors: Mapping[str, Placed], candidate: Candidate, reason: str) -> None:
        asked, candidate = candidate, self._at_their_places(candidate, tensors)
        inputs = {n: self._convert(tensor, candidate.operands[n], node, n) for n, tensor in tensors.items()}
        if id(asked) not in self.priced:
            self.priced[id(asked)] = asked, self._cost(node, candidate)
        cost = self.priced[id(asked)][1]
        choice = Choice(candidate.target, candidate.impl, candidate.operands, reason, cost, candidate.handle)
        self._place(node, inputs, candidate.results, choice)

    # ------------------------------------------------------------------ the other graph's advice

    def _advice(self, node: Node) -> tuple[Node, Choice] | None:
        """Return the other graph's node of this name, with its choice; None where it has none of this kind."""
        if self.advised[0] is not node:
            self.advised = node, self._advice_for(node)
        return self.advised[1]

    def _advice_for(self, node: Node) -> tuple[Node, Choice] | None:
        if node.name not in self.formatted:
            return None
        other = self.formatted.node(node.name)
        if other.choice is None or kind_of(other) != kind_of(node) or len(other.descs) != len(node.results):
            return None
        if other.choice.operands.keys() != self.formatted.inputs(other.name).keys():
            return None
        return other, other.choice

    def _wanted(self, node: Node, tensors: Mapping[str, Placed]) -> dict[str, MemoryDesc]:
        """Return the formats that the other graph's node reads reordered copies in, for these sizes."""
        advice = self._advice(node)
        if advice is None:
            return {}
        other, choice = advice
        read = self.formatted.inputs(other.name)
        copied = [name for name, value in read.items() if self.formatted.node(value.node).op == "reorder"]
        found = {
            n: _moved(choice.operands[n], tensors[n].desc.dims) for n in copied if n in tensors and n in choice.operands
        }
        return {name: desc for name, desc in found.items() if desc is not None}

    def _same(self, node: Node, tensors: Mapping[str, Placed], *, repacking: bool = False) -> Candidate | None:
        """Return the same way to run a node; None where it is impossible for its sizes.

        `repacking`: return the same implementation with parameters in other formats instead.
        """
        advice = self._advice(node)
        if advice is None or advice[1].operands.keys() != tensors.keys() or advice[1].target == "view":
            return None
        other, choice = advice
        results = [_moved(d, t.dims) for d, t in zip(other.descs, node.results, strict=True)]
        wanted = tuple(desc for desc in results if desc is not None)
        if len(wanted) < len(results):
            return None
        present = {name: tensor.desc for name, tensor in tensors.items()}
        if self._is_equal(node, other, choice, present) and wanted == other.descs:
            return Candidate(choice.target, choice.impl, choice.operands, wanted, handle=choice.handle)
        moved = {name: _moved(choice.operands[name], desc.dims) or desc for name, desc in present.items()}
        for given in ({**present, **self._wanted(node, tensors)}, moved):
            found = self._asked_once(node, choice, given, wanted)
            if found is not None and (found.operands != given) is repacking:
                return found
        return None

    def _is_equal(self, node: Node, other: Node, choice: Choice, present: Request) -> bool:
        """Return whether a node does what the other graph's does, in its formats, whose implementation can run here."""
        handle = choice.handle
        if handle is None or isinstance(handle, Mapping) or (self.renews and getattr(handle, "is_for_threads", False)):
            return False
        mine = (node.attrs, node.post_ops, node.exact, node.grids, present)
        return mine == (other.attrs, other.post_ops, other.exact, other.grids, choice.operands)

    def _asked_once(
        self, node: Node, choice: Choice, given: Request, wanted: tuple[MemoryDesc, ...]
    ) -> Candidate | None:
        tail = tuple((post_op.op, post_op.attrs, post_op.operands) for post_op in node.post_ops)
        how = *given.items(), wanted, choice.target, choice.impl
        key = node.op, node.attrs, tail, node.exact, node.grid_forms, node.results, how
        if key not in self.known:
            self.known[key] = self._asked(node, choice, given, wanted)
        return self.known[key]

    def _asked(self, node: Node, choice: Choice, given: Request, wanted: tuple[MemoryDesc, ...]) -> Candidate | None:
        """Return an implementation that reads given formats, else one that reads parameters alone in others."""
        target = self.setting.fallback if choice.target == self.setting.fallback.name else self.setting.target
        written = dict(zip(result_names(node), wanted, strict=True))
        parameters = {name: unspecified(given[name]) for name in _parameters(node, given)}
        free = {name: unspecified(desc) for name, desc in written.items()}
        # some implementations take only the formats of results, of weights, or of all that they choose themselves
        given_parameters = (written, free) if parameters else ()
        chosen = {name: unspecified(desc) for name, desc in given.items()} | free
        requests = [{**parameters, **written}, {**parameters, **free}, *given_parameters, chosen]

        def found(asked: Request) -> tuple[Candidate | None, Candidate | None]:
            """Return the implementation in the given formats, else one with parameters in others."""
            other = None
            for candidate in target.named(node, {**given, **asked}, choice):
                if candidate.results != wanted:
                    continue
                # a target's format never includes the beginning of a slice
                others = {n for n, desc in given.items() if candidate.operands[n] not in (desc, desc.at_start())}
                if not others:
                    return replace(candidate, operands=dict(given)), None
                if others <= parameters.keys() and other is None:
                    read = {name: candidate.operands[name] for name in others}
                    other = replace(candidate, operands={**given, **read})
            return None, other

        # a descriptor takes a third of a millisecond: what was right for another shape is asked for first
        place = self.requests.get(node.name, 0)
        if 0 < place < len(requests) and (same := found(requests[place])[0]) is not None:
            return same
        repacked = None
        for place, asked in enumerate(requests):
            if repacked is not None and asked is not written:
                continue  # it takes these results: at most, it takes these parameters, too
            same, other = found(asked)
            if same is not None:
                self.requests[node.name] = place
                return same
            repacked = repacked or other
        return repacked

    def _in_place(self, node: Node, tensors: Mapping[str, Placed]) -> Candidate | None:
        """Return the concat that moves no data, where the other graph's is one."""
        advice = self._advice(node)
        if advice is None or advice[1].target != "view" or not isinstance(node.attrs, Concat):
            return None
        whole = _moved(advice[0].descs[0], node.results[0].dims)
        sizes = [tensor.desc.dims[node.attrs.axis] for tensor in tensors.values()]
        parts = in_place_parts(whole, node.attrs.axis, sizes) if whole is not None else None
        if whole is None or parts is None:
            return None
        operands = {name: part.at_start() for name, part in zip(tensors, parts, strict=True)}
        return Candidate("view", "in_place", operands, (whole,))

    def _converters(self, node: Node, have: MemoryDesc, wanted: MemoryDesc) -> Iterator[Candidate]:
        known = self.reorders.get((node.attrs, have, wanted))
        if known is not None and not node.grids:
            yield Candidate(known.target, known.impl, known.operands, (wanted,), handle=known.handle)
        yield from super()._converters(node, have, wanted)

    # ------------------------------------------------------------------ local choices

    def _local(self, node: Node, tensors: Mapping[str, Placed]) -> Candidate | None:
        """Return the cheapest way to run a node between the formats around it; None where it has no choice."""
        category = opdef(node.op).category
        if category is Category.HOST or any(one.role is Role.WORKSPACE for one in ports(node, tensors)):
            return None
        best, least = None, inf
        for candidate in self._offers(node, tensors):
            changes = [self._change(tensors[name].desc, desc) for name, desc in candidate.operands.items()]
            cost = self._cost(node, candidate) + sum(changes)
            if not candidate.is_ref and cost < least:
                best, least = candidate, cost
        return best

    def _offers(self, node: Node, tensors: Mapping[str, Placed]) -> Iterator[Candidate]:
        """Yield ways with the operands as they come or as the other graph has them, and with any formats."""
        present = {name: tensor.desc for name, tensor in tensors.items()}
        free = free_request(node, {name: TensorType(desc.dims, desc.dtype) for name, desc in present.items()})
        parameters = set(_parameters(node, tensors))
        read = {name: desc for name, desc in present.items() if name not in parameters}
        wanted = {name: desc for name, desc in self._wanted(node, tensors).items() if name in read}
        requests = [{**free, **read, **wanted}, {**free, **read}]
        if opdef(node.op).category is Category.COMPUTE:
            requests.append(free)
        for request in requests:
            yield from islice(self.setting.target.candidates(node, request), _COMPARED)

    def _change(self, have: MemoryDesc, wanted: MemoryDesc) -> float:
        if have == wanted or have.at_start() == wanted:
            return 0.0
        cost = self.costs.reorder(have, wanted)
        return inf if cost is None else cost

    def _cost(self, node: Node, candidate: Candidate) -> float:
        return 0.0 if candidate.target == "view" else self.costs.node(node, candidate)


def fusion_for(
    graph: Graph, node: Node, formatted: Graph, fusions: Iterable[Fusion]
) -> tuple[Node, dict[str, Value], tuple[str, ...]] | None:
    """Return the node that computed this one and others in another, formatted graph."""
    if node.is_boundary or node.name not in formatted:
        return None
    other = formatted.node(node.name)
    if (other.op == node.op and not other.post_ops and not node.post_ops) or kind_of(other) == kind_of(node):
        return None
    for fusion in fusions:
        found = fusion(graph, node)
        if found is None or kind_of(found[0]) != kind_of(other):
            continue
        if found[1].keys() == formatted.inputs(other.name).keys():
            return found[0], found[1], found[2]
    return None


def _parameters(node: Node, operands: Iterable[str]) -> list[str]:
    """Return the names of the operands that are learned."""
    return [one.name for one in ports(node, operands) if one.role is Role.PARAMETER]


def kind_of(node: Node) -> tuple[str, ...]:
    """Return the ops that a node computes one after the other."""
    return (node.op, *(post_op.op for post_op in node.post_ops))


@lru_cache(maxsize=4096)
def _moved(desc: MemoryDesc, dims: tuple[int, ...]) -> MemoryDesc | None:
    """Return a format for the size of another tensor of its type; None where it has no form for it."""
    return desc if desc.dims == dims else like(MemoryDesc(dims, desc.dtype), desc)
