"""Primitives chosen anew for another number of threads, in the formats of a formatted graph.

A primitive is compiled for a number of threads, and some implementations want weights in other blocks for another
number. Owns which implementation takes a node's place then, and the reorders that it needs. Activations keep their
formats.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from fmtprop.errors import UnsupportedOpError
from fmtprop.ir import Choice, Graph, Node, TensorType, Value, result_names
from fmtprop.layout import MemoryDesc
from fmtprop.ops.reorder import Reorder
from fmtprop.passes.assignment.formats import describe
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import unused_name
from fmtprop.passes.target import Candidate, Target


@dataclass(frozen=True)
class ForThreads(Pass):
    """Choose primitives for the number of threads that is set now.

    Formatted graph to formatted graph. Where no implementation takes a node's operands as they are, a reorder is
    added; one of a constant runs once, when a plan is made.
    """

    #: from a node that runs by a primitive for one number of threads to the target that offers such
    target_of: Callable[[Node], Target]
    fallback: Target

    def run(self, graph: Graph) -> Graph:
        """Return the graph with other primitives.

        Raises UnsupportedOpError if a node has no primitive for this number of threads.
        """
        out, computed = graph.copy(), graph.dependents()
        for node in graph.nodes():
            choice = node.choice
            if choice is None or node.name not in computed or not getattr(choice.handle, "is_for_threads", False):
                continue
            inputs, target = out.inputs(node.name), self.target_of(node)
            constants = {name for name, value in inputs.items() if value.node not in computed}
            chosen = _closest(node, choice, constants, target)
            operands = dict(choice.operands)
            for name, value in inputs.items():
                if not _is_same(chosen.operands[name], operands[name]):
                    operands[name] = chosen.operands[name]
                    inputs[name] = self._converted(out, computed, node, value, operands[name])
            changed = replace(choice, impl=chosen.impl, operands=operands, handle=chosen.handle)
            out.replace(node.with_(choice=changed))
            out.set_inputs(node.name, inputs)
        return out

    def _converted(self, out: Graph, computed: Set[str], reader: Node, value: Value, wanted: MemoryDesc) -> Value:
        """Return a value in another format, by a reorder that is there or a new one; a reorder of a reorder is one."""
        made_by = out.node(value.node)
        if made_by.op == "reorder" and made_by.name in computed:
            value = out.inputs(made_by.name)["src"]
        for name, _ in out.readers(value):
            known = out.node(name)
            if known.op == "reorder" and known.descs[0] == wanted:
                return Value(name)
        have = out.desc_of(value)
        type_ = TensorType(wanted.dims, wanted.dtype)
        name = unused_name(f"{reader.name}_reorder", out, out)
        attrs = Reorder(wanted.dtype.value if wanted.dtype is not have.dtype else "")
        node = Node(name, "reorder", attrs, (type_,), descs=(wanted,), origin=reader.origin)
        reason = f"{reader.name} wants {describe(wanted)} with this number of threads"
        for target in (self.target_of(reader), self.fallback):
            for candidate in target.candidates(node, {"src": have, "dst": wanted}):
                return out.add(replace(node, choice=candidate.choice(reason)), {"src": value})[0]
        raise UnsupportedOpError(f"{reader.label}: nobody can convert {describe(have)} to {describe(wanted)}")


def _closest(node: Node, choice: Choice, constants: Set[str], target: Target) -> Candidate:
    """Return the node's own implementation, or else another that is not a slow reference.

    An implementation that reads all operands in their present formats comes first, then one that reads constants in
    other formats, then one that reads activations in other formats. Results keep their formats, and so does the operand
    of a sum.
    """
    names = result_names(node)
    wanted = {**choice.operands, **dict(zip(names, node.descs, strict=False))}
    kept = {*names, *(post_op.operand for post_op in node.post_ops if post_op.op == "sum")}
    tail = {name for post_op in node.post_ops for name in post_op.operands}
    found: dict[tuple[bool, bool, bool], Candidate] = {}
    for free in (set(), set(names), {*names, *tail}, {*names, *constants}, set(wanted)):
        # On an axis of size 1, strides place no element differently, but oneDNN compares them, and some implementations
        # take only those that they choose themselves: so they may choose, and only an equal format is taken.
        request = {n: MemoryDesc.any(d.dims, d.dtype) if n in free else d for n, d in wanted.items()}
        for candidate in target.candidates(node, request):
            given = {**candidate.operands, **dict(zip(names, candidate.results, strict=False))}
            differing = {name for name, desc in wanted.items() if not _is_same(given[name], desc)}
            is_other = candidate.impl != choice.impl
            if differing.isdisjoint(kept) and not (candidate.is_ref and is_other):
                found.setdefault((not differing <= constants, is_other, bool(differing)), candidate)
        if (False, False, False) in found:
            break
    if not found:
        raise UnsupportedOpError(f"{node.label} with {choice.impl} has no other primitive that writes its format")
    return found[min(found)]


def _is_same(one: MemoryDesc, other: MemoryDesc) -> bool:
    return one.at_start() == other.at_start()
