"""Values that must stay in f32 where a model is lowered to a narrower type: positions and states."""

from __future__ import annotations

from fmtprop.ir import Category, Graph, Node, Value, opdef
from fmtprop.layout import DataType
from fmtprop.passes.editing import constant, is_constant

#: results of one layer on which a value depends if it is a loop's state; two may be those of a pair of inputs
_REPETITIONS = 3


def wide_values(graph: Graph) -> set[Value]:
    """Return the values that are computed in f32: positions, states, and what is read in f32 alone."""
    found = _positions(graph)
    found |= _states(graph, found)
    unrounded = set(found)
    for node in reversed(list(graph.nodes())):
        value = Value(node.name, 0)
        if node.is_boundary or is_compute(node) or len(node.results) != 1 or not graph.readers(value):
            continue
        if all(_reads_unrounded(graph.node(reader), name, unrounded) for reader, name in graph.readers(value)):
            unrounded.add(value)
            if opdef(node.op).elementwise or node.op == "concat":
                found.add(value)
    return found


def _reads_unrounded(reader: Node, operand: str, unrounded: set[Value]) -> bool:
    """Return whether a node reads an operand in f32, or hands it on to such nodes alone."""
    if reader.op == "output":
        return True
    if opdef(reader.op).category is Category.HOST and not opdef(reader.op).numbers.narrows(reader.attrs):
        return True
    return Value(reader.name, 0) in unrounded and (not is_compute(reader) or operand in reader.tail)


def _states(graph: Graph, positions: set[Value]) -> set[Value]:
    """Return the results of element-wise ops on positions, or on starts and the caller's numbers of the same shape."""
    found, changed = set(positions), _changed_again(graph)
    for node in graph.nodes():
        if node.op == "input" and node.results[0].dtype is DataType.F32:
            found.add(Value(node.name, 0))
        if node.is_boundary:
            continue
        result, is_view = Value(node.name, 0), opdef(node.op).category is Category.VIEW
        operands = _passed_on(graph, node)
        found |= {value for value in operands if _is_start(graph, value, node, result in changed)}
        read = found.intersection(operands)
        if any(is_view or value in positions or graph.type_of(value).dims == node.results[0].dims for value in read):
            found.add(result)
    return found


def _passed_on(graph: Graph, node: Node) -> list[Value]:
    """Return the operands of which a node is an element-wise function or a view."""
    inputs, declaration = graph.inputs(node.name), opdef(node.op)
    if is_compute(node):
        return [inputs[name] for name in node.tail]
    return list(inputs.values()) if declaration.elementwise or declaration.category is Category.VIEW else []


def _is_start(graph: Graph, value: Value, node: Node, is_changed_again: bool) -> bool:
    """Return whether a node's operand is a constant state: zeros, or other numbers that a loop changes.

    Numbers that are added once are none, such as those of a learned place.
    """
    type_ = graph.type_of(value)
    if not is_constant(graph, value) or type_.dtype is not DataType.F32 or type_.dims != node.results[0].dims:
        return False
    if is_changed_again:
        return True
    numbers = constant(graph, value)
    return numbers is not None and numbers.numel() > 1 and bool((numbers == numbers.flatten()[0]).all())


def _changed_again(graph: Graph) -> set[Value]:
    """Return the values that become element-wise functions of several results of one layer, as the state of a loop."""
    made: dict[Value, dict[str, frozenset[str]]] = {}  # layer -> some of its results on which a value depends
    changed: set[Value] = set()
    nodes = [node for node in graph.nodes() if not node.is_boundary]
    for node in nodes:
        inputs, layers = graph.inputs(node.name), dict[str, frozenset[str]]()
        operands = [made.get(value, {}) for value in _passed_on(graph, node)]
        if is_compute(node) and node.origin and "weights" in inputs and is_constant(graph, inputs["weights"]):
            operands.append({f"{node.origin} {graph.type_of(inputs['weights']).dims}": frozenset((node.name,))})
        for layer, results in (item for operand in operands for item in operand.items()):
            layers[layer] = frozenset(sorted(layers.get(layer, frozenset()) | results)[:_REPETITIONS])
        made[Value(node.name, 0)] = layers
        if any(len(results) == _REPETITIONS for results in layers.values()):
            changed.add(Value(node.name, 0))
    for node in reversed(nodes) if changed else ():
        if Value(node.name, 0) in changed:
            changed.update(_passed_on(graph, node))
    return changed


def _positions(graph: Graph) -> set[Value]:
    """Return the values that are positions, or lead to some, up to the results of compute-intensive ops."""
    found: set[Value] = set()
    for node in reversed(list(graph.nodes())):
        if node.is_boundary:
            continue
        inputs = graph.inputs(node.name)
        names = set(opdef(node.op).numbers.positions(node.attrs))
        if any(Value(node.name, index) in found for index in range(len(node.results))):
            names |= node.tail if is_compute(node) else inputs.keys()
        found |= {inputs[name] for name in names}
    return found


def is_compute(node: Node) -> bool:
    """Whether a node is compute-intensive by its declaration."""
    return not node.is_boundary and opdef(node.op).category is Category.COMPUTE
