"""Format assignment: every tensor gets a memory descriptor, every change of format becomes a reorder node.

The pass walks the graph in topological order and builds a new graph. The policy proposes requests, and the target
answers which of them it can serve. The pass owns the mechanics of all greedy policies: one reorder serves all readers;
a reorder to an existing format, or without a change, is not made; views transform descriptors, with a reorder before
if a format cannot express the view (SPEC M8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from fmtprop.errors import FormatError, GraphError, ShapeError, UnsupportedOpError
from fmtprop.ir import Category, Choice, Graph, Node, TensorType, Value, loses_special_values, opdef, result_names
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.reorder import Reorder
from fmtprop.passes.assignment.formats import dense, describe, plain
from fmtprop.passes.assignment.identities import HALVES
from fmtprop.passes.assignment.policies import POLICIES, Policy, Question
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import unused_name
from fmtprop.passes.precision.in_bytes import in_bytes, in_reals, reads_bytes, why_in_floats
from fmtprop.passes.target import Candidate, Setting, can_be_read, free_results

#: reason of a node that is a call of PyTorch's
NO_PRIMITIVE = "no oneDNN primitive: PyTorch runs it"
#: is in the reason of a node of which all of a target's implementations lose what must be kept
LOSES = "loses NaN or infinities"


@dataclass(frozen=True)
class AssignFormats(Pass):
    """Assign formats by one of the greedy policies.

    Requires a normal graph, returns a formatted one: each node has ``descs`` and ``choice``.

    SPEC M7, M8, M9; oneDNN developer guide, "Memory Format Propagation".
    """

    #: ``"plain"``, ``"naive"`` or ``"propagate"``
    policy: str
    setting: Setting
    #: the caller's own policy instead of the named one: from a :class:`~fmtprop.passes.assignment.policies.Question` to
    #: the :class:`~fmtprop.passes.assignment.policies.Option` to try, best first
    rule: Policy | None = None

    def __post_init__(self) -> None:
        if self.rule is None and self.policy not in POLICIES:
            raise GraphError(f"unknown policy {self.policy!r}; known: {', '.join(POLICIES)}")

    def run(self, graph: Graph) -> Graph:
        """Return the formatted graph."""
        return Assignment(self, graph).run()


class Placed(NamedTuple):
    """A value of the new graph and the descriptor that its readers should see.

    The descriptor can differ from the value's in the data type: this is a pending conversion, which is combined with
    the first reader's change of format.
    """

    value: Value
    desc: MemoryDesc


class Assignment:
    """State of one run of :class:`AssignFormats`."""

    def __init__(self, spec: AssignFormats, graph: Graph) -> None:
        self.spec, self.setting = spec, spec.setting
        self.source = graph
        self.out = Graph(graph.name, graph.structure)
        self.tensors: dict[Value, Placed] = {}
        #: value of the new graph -> the value that it is a reordered copy of
        self.root: dict[Value, Value] = {}
        #: (root, format) -> the copy in that format
        self.copies: dict[tuple[Value, MemoryDesc], Value] = {}
        self.policy = spec.rule or POLICIES[spec.policy]

    def run(self) -> Graph:
        """Return the formatted graph."""
        for node in self.source.nodes():
            self._visit(node)
        self.out.remove_dead()
        return self.out

    def _visit(self, node: Node) -> None:
        if node.op == "input":
            desc = self.setting.boundary.get(node.name, _row_major(node.results[0]))
            self._place(node, {}, (desc,), Choice("boundary", "input", {}, "format of the caller's tensor"))
        elif node.op == "constant":
            data = self.source.constants[node.name]
            self._place(node, {}, (desc_of_constant(node, data),), Choice("boundary", "constant", {}, "as stored"))
            self.out.constants[node.name] = data
        elif node.op == "output":
            self._visit_output(node)
        elif node.op == "reorder":
            self._visit_cast(node)
        elif opdef(node.op).category is Category.VIEW:
            self._visit_view(node)
        else:
            self._visit_op(node)

    # ------------------------------------------------------------------ kinds of node

    def _visit_output(self, node: Node) -> None:
        tensor = self._operands(node)["src"]
        wanted = self.setting.boundary.get(node.name, plain(in_reals(node, {"src": tensor.desc})["src"]))
        value = self._convert(tensor, wanted, node, "src")
        self._place(node, {"src": value}, (), Choice("boundary", "output", {"src": wanted}, "format of the caller"))

    def _visit_cast(self, node: Node) -> None:
        """Leave a conversion of data type pending: one reorder converts it together with the reader's format."""
        tensor = self._operands(node)["src"]
        real = in_reals(node, {"src": tensor.desc})["src"]
        if real != tensor.desc:  # a conversion of bytes rounds nothing, but takes their scale
            tensor = Placed(self._convert(tensor, real, node, "src"), real)
        value, desc = tensor
        stored, pending = self.out.desc_of(value).dtype, desc.dtype
        if pending is not stored and not (pending is DataType.F32 and stored in HALVES):
            # The pending conversion rounds: another one after it must start from its result.
            value = self._convert(Placed(value, desc), desc, node, "src")
            self.root[value] = value
        self.tensors[Value(node.name)] = Placed(value, desc.with_dtype(node.results[0].dtype))

    def _visit_view(self, node: Node) -> None:
        tensor = self._operands(node)["src"]
        rule = opdef(node.op).view
        if rule is None:
            raise GraphError(f"{node.label} has no view rule")
        refusal = ""
        for desc in dict.fromkeys(self._view_formats(node, tensor)):
            try:
                result = rule.dst(node.attrs, desc, node.results[0])
                if not can_be_read(result, self.setting.target, self.setting.fallback):
                    raise FormatError(f"{self.setting.target.name} cannot read {result}")
            except FormatError as error:
                refusal = refusal or str(error)  # the error itself would keep this frame alive
                continue
            value = self._convert(tensor, desc, node, "src")
            reason = "view: no data moves" if not refusal else f"view after a reorder: {refusal}"
            self._place(node, {"src": value}, (result,), Choice("view", "view", {"src": desc}, reason))
            return
        # no descriptor expresses it (such as a reversal), so the data moves
        operands = {"src": tensor.desc}
        candidate = self._fall_back(node, operands)
        value = self._convert(tensor, candidate.operands["src"], node, "src")
        reason = f"no format takes this view, copied instead: {refusal}"
        self._place(node, {"src": value}, candidate.results, candidate.choice(reason))

    def _view_formats(self, node: Node, tensor: Placed) -> Iterable[MemoryDesc]:
        """Return the formats in which a view may read its source, the best first."""
        return tensor.desc, dense(tensor.desc), plain(tensor.desc)

    def _visit_op(self, node: Node) -> None:
        operands = self._operands(node)
        candidate, reason = self._decide(node, {name: tensor.desc for name, tensor in operands.items()})
        candidate = self._at_their_places(candidate, operands)
        inputs = {
            name: self._convert(tensor, candidate.operands[name], node, name) for name, tensor in operands.items()
        }
        self._place(node, inputs, candidate.results, candidate.choice(reason))
        if self.spec.policy == "naive":
            for index, (name, desc) in enumerate(zip(result_names(node), candidate.results, strict=True)):
                if desc.kind != "blocked":
                    continue  # a workspace: only its gradient reads it, and no reorder can
                value = Value(node.name, index)
                back = self._convert(Placed(value, desc), plain(desc), node, name)
                self.root[back] = back  # readers start from the plain copy: this is the cost of this policy
                self.tensors[value] = Placed(back, plain(desc))

    # ------------------------------------------------------------------ deciding

    def _decide(self, node: Node, given: Mapping[str, MemoryDesc]) -> tuple[Candidate, str]:
        declaration = opdef(node.op)
        main = self.setting.target.name
        given, stored = in_reals(node, given), given
        if declaration.category is Category.HOST:
            return self._fall_back(node, given), NO_PRIMITIVE
        bytes_ = self._decide_bytes(node, stored)
        if bytes_ is not None:
            return bytes_
        loses = node.exact and loses_special_values(node)
        why = f"{main} {LOSES}" if loses else f"{main} has no implementation of it here"
        question = Question(node, declaration, given, self.setting.target.reorder_cost)
        for option in self.policy(question):
            for candidate in self.setting.target.candidates(node, option.request):
                if any(candidate.operands[name] != given[name] for name in question.workspaces()):
                    why = "another implementation wrote the workspace"
                    continue
                if not candidate.is_ref:
                    return candidate, option.reason + why_in_floats(node, candidate, self.setting)
                # its loops took 5 to 400 times as long as PyTorch's operators (docs/coverage.md)
                why = f"{main} has only a reference implementation"
        candidate = self._fall_back(node, given)
        return candidate, f"{why}: PyTorch runs it{why_in_floats(node, candidate, self.setting)}"

    def _decide_bytes(self, node: Node, given: Mapping[str, MemoryDesc]) -> tuple[Candidate, str] | None:
        """Return the first way to run a node on bytes of the tensors' grids; None without an optimized one."""
        if not self.setting.allows_bytes(node):
            return None
        question = Question(node, opdef(node.op), given, self.setting.target.reorder_cost)
        for option in self.policy(question):
            for request in in_bytes(node, option.request):
                for candidate in self.setting.target.candidates(node, request):
                    if not candidate.is_ref:
                        return candidate, f"{option.reason}; {'in' if reads_bytes(candidate) else 'writes'} bytes"
        return None

    def _fall_back(self, node: Node, given: Mapping[str, MemoryDesc]) -> Candidate:
        request = {name: desc if desc.is_plain else plain(desc) for name, desc in given.items()}
        for candidate in self.setting.fallback.candidates(node, {**request, **free_results(node)}):
            return candidate
        raise UnsupportedOpError(
            f"{node.label}: neither {self.setting.target.name} nor {self.setting.fallback.name} can run it"
        )

    def _at_their_places(self, candidate: Candidate, operands: Mapping[str, Placed]) -> Candidate:
        """Keep the operands' offsets: a target's format never includes the beginning of a slice."""
        moved = {}
        for name, tensor in operands.items():
            actual = self.out.desc_of(tensor.value)
            if actual != candidate.operands[name] and actual.at_start() == candidate.operands[name]:
                moved[name] = actual
        return replace(candidate, operands={**candidate.operands, **moved}) if moved else candidate

    # ------------------------------------------------------------------ building

    def _operands(self, node: Node) -> dict[str, Placed]:
        return {name: self.tensors[value] for name, value in self.source.inputs(node.name).items()}

    def _place(self, node: Node, inputs: Mapping[str, Value], descs: tuple[MemoryDesc, ...], choice: Choice) -> None:
        values = self.out.add(as_stored(node, descs).with_(descs=descs, choice=choice), inputs)
        for value, desc in zip(values, descs, strict=True):
            self.tensors[value] = Placed(value, desc)

    def _convert(self, tensor: Placed, wanted: MemoryDesc, reader: Node, operand: str) -> Value:
        """Return the tensor's value in the wanted format: itself, an existing copy, or a new reorder."""
        value, actual = tensor.value, self.out.desc_of(tensor.value)
        if actual == wanted:
            return value
        root = self.root.get(value, value)
        if self.out.desc_of(root) == wanted:
            return root
        known = self.copies.get((root, wanted))
        if known is not None:
            return known
        # from the root: one reorder instead of a chain, and no double rounding
        source = root if self.out.desc_of(root).kind == "blocked" else value
        copy = self._reorder(source, wanted, reader, operand)
        self.root[copy] = root
        self.copies[root, wanted] = copy
        return copy

    def _reorder(self, source: Value, wanted: MemoryDesc, reader: Node, operand: str) -> Value:
        have = self.out.desc_of(source)
        type_ = TensorType(wanted.dims, wanted.dtype)
        name, grid = unused_name("reorder", self.out, self.source), reader.grids.get(operand)
        # between bytes of a grid and reals it keeps the numbers
        is_cast = wanted.dtype != have.dtype and grid is None
        attrs = Reorder(wanted.dtype.value if is_cast else "")
        origin = reader.origin or self.out.node(source.node).origin  # an output is nowhere in the model
        node = Node(name, "reorder", attrs, (type_,), origin=origin)
        if grid is not None:
            node = node.with_(grids={"src": grid, "dst": grid})
        reason = f"{reader.name}.{operand} wants {describe(wanted)}, {source} gives {describe(have)}"
        for candidate in self._converters(node, have, wanted):
            return self.out.add(node.with_(descs=(wanted,), choice=candidate.choice(reason)), {"src": source})[0]
        for middle in (plain(wanted).with_dtype(have.dtype), plain(wanted)):  # first the strides, or the data type
            if middle not in (have, wanted):
                return self._reorder(self._reorder(source, middle, reader, operand), wanted, reader, operand)
        raise UnsupportedOpError(f"{node.label}: no target converts {have!r} to {wanted!r} for {reader.name}.{operand}")

    def _converters(self, node: Node, have: MemoryDesc, wanted: MemoryDesc) -> Iterator[Candidate]:
        """Yield the ways to run a reorder."""
        for target in (self.setting.target, self.setting.fallback):
            yield from target.candidates(node, {"src": have, "dst": wanted})


def as_stored(node: Node, descs: tuple[MemoryDesc, ...]) -> Node:
    """Return a node whose results have the types that are stored: bytes where they lie on a grid."""
    if not node.grids or node.is_boundary:
        return node
    results = tuple(type_.with_dtype(desc.dtype) for type_, desc in zip(node.results, descs, strict=True))
    return node if results == node.results else node.with_(results=results)


def _row_major(type_: TensorType) -> MemoryDesc:
    return MemoryDesc(type_.dims, type_.dtype)


def desc_of_constant(node: Node, data: object) -> MemoryDesc:
    """Return a constant's format: its tensor's strides if they are dense, otherwise row-major."""
    type_ = node.results[0]
    stride = getattr(data, "stride", None)
    if stride is None or 0 in type_.dims:
        return _row_major(type_)
    try:
        desc = _strided(type_.dims, type_.dtype, tuple(stride()))
    except ShapeError:  # windows that overlap
        return _row_major(type_)
    return desc if desc.is_packed else _row_major(type_)


@lru_cache(maxsize=4096)  # constants of a few sizes are many
def _strided(dims: tuple[int, ...], dtype: DataType, strides: tuple[int, ...]) -> MemoryDesc:
    return MemoryDesc(dims, dtype, strides=strides)
