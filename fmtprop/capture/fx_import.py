"""Import of an exported program's calls as nodes of a graph.

This module owns the walk over the fx graph: it finds each call's arguments by its schema, and its module.
:mod:`fmtprop.capture.call_import` imports the calls, :mod:`fmtprop.capture.exporting` exports programs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol

import torch
from torch import fx

from fmtprop.capture.call_import import CallImporter, FoundCall
from fmtprop.capture.torch_call import add_constant, by_schema, check_real
from fmtprop.errors import ImportModelError
from fmtprop.ir.graph import Graph
from fmtprop.ops.pytorch import HigherOrderOperator, OpOverload

#: a frame in a call's recorded stack
_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+)', re.MULTILINE)
#: folder of PyTorch's files: their lines are not the user's
_TORCH = f"{PurePath(torch.__file__).parent}/"


class Nodes(Protocol):
    """The calls of a program."""

    @property
    def nodes(self) -> Iterable[Any]:
        """The calls in order."""
        ...


class Calls(Protocol):
    """A functional program: no mutation, no aliasing."""

    @property
    def graph(self) -> Nodes:
        """Its calls."""
        ...


def import_calls(graph: Graph, module: Calls, values: Mapping[str, Any], outputs: int | None = None) -> list[Any]:
    """Add a node for every call of an fx graph.

    `values`: meaning of each placeholder: a :class:`Value`, or a fixed plain number. Of each ``get_attr`` node too, if
    the module does not have its tensor. `outputs`: number of the first results that leave the graph, so must be real;
    by default all.
    """
    walk = _Walk(graph, values)
    for node in module.graph.nodes:
        if node.op == "output":
            for argument in node.args[0][:outputs]:
                if isinstance(argument, fx.Node):
                    check_real(argument.meta.get("val"), f"output {argument.name}")
            return [walk.plain(argument) for argument in node.args[0]]
        if node.op == "get_attr" and node.name not in walk.values:
            walk.attribute(node, module)
            continue
        walk.visit(node)
    raise ImportModelError("the exported program has no output")


class _Walk:
    def __init__(self, graph: Graph, values: Mapping[str, Any]) -> None:
        self.graph = graph
        self.calls = CallImporter(graph)
        self.values: dict[str, Any] = dict(values)

    def attribute(self, node: fx.Node, module: Calls) -> None:
        """Add a tensor attribute of the program. Other attributes are branches, which are refused at their use."""
        value = operator.attrgetter(str(node.target))(module)
        if isinstance(value, torch.Tensor):
            check_real(value, f"tensor {node.target}")
            self.values[node.name] = add_constant(self.graph, value.clone(), "")

    def visit(self, node: fx.Node) -> None:
        if node.name in self.values or node.op == "placeholder":
            return  # placeholders are known
        if node.op != "call_function":
            raise ImportModelError(f"{_where(node)}: {node.op} is not part of an exported program")
        target = node.target
        if target is operator.getitem:
            source, index = (self.plain(argument) for argument in node.args)
            self.values[node.name] = source[index]
        elif isinstance(target, OpOverload):
            self.values[node.name] = self.call(node, target)
        elif isinstance(target, HigherOrderOperator) and isinstance((*node.args, None)[0], OpOverload):
            op = node.args[0]  # in the exporter's functional form
            raise ImportModelError(f"{_where(node)}: {op} changes its arguments in place; use one that does not")
        elif isinstance(target, HigherOrderOperator):
            raise ImportModelError(
                f"{_where(node)}: control flow ({target}) cannot be in a graph, which runs every op once; "
                "take the branch or unroll the loop in Python before exporting"
            )
        else:
            name = getattr(target, "__name__", str(target))
            raise ImportModelError(
                f"{_where(node)}: {name} computes with sizes at run time; shapes must be static: export without "
                "dynamic_shapes"
            )

    def plain(self, argument: Any) -> Any:
        """Replace fx nodes by their values, and torch's containers and types by plain ones."""
        if isinstance(argument, fx.Node):
            if argument.name not in self.values:
                raise ImportModelError(f"{_where(argument)}: its value is not part of the graph")
            return self.values[argument.name]
        if isinstance(argument, list | tuple):
            return [self.plain(item) for item in argument]
        return argument

    def call(self, node: fx.Node, target: OpOverload) -> Any:
        """Import a call of an overload."""
        given = by_schema(target, node.args, node.kwargs)
        if given is None:
            raise ImportModelError(f"{_where(node)}: its arguments do not fit {target._schema}")
        args = {key: self.plain(value) for key, value in given.items()}
        recorded = node.meta.get("val")
        count = len(recorded) if isinstance(recorded, list | tuple) else 1
        return self.calls.add(
            FoundCall(
                target, args, recorded, node.name, origin_of(node), _used_results(node, count), _is_complex(node),
                lambda name: given[name].meta["val"],
            )
        )  # fmt: skip


# ---------------------------------------------------------------- reading fx nodes


def placeholders(program: Any) -> list[fx.Node]:
    """Return the inputs of a module or program with an fx graph."""
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def results_of(program: Any) -> Sequence[Any]:
    """Return the nodes of its results, and results that are fixed numbers."""
    results: Sequence[Any] = next(node for node in program.graph.nodes if node.op == "output").args[0]
    return results


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph."""
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    return made


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that made the memory of a tensor: for a view, it is the source of the view."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a node is a view of, or a part of its views; None for other nodes."""
    if node.target is operator.getitem:
        views: Any = node.args[0]
        return viewed(views) if isinstance(views, fx.Node) else None
    return node.all_input_nodes[0] if isinstance(node.target, OpOverload) and node.target.is_view else None


def is_in_place(node: fx.Node) -> bool:
    """Return whether a call of an overload changes a tensor."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_complex(node: fx.Node) -> bool:
    """Return whether a call reads or returns a complex tensor."""
    recorded = [at.meta.get("val") for at in (node, *node.all_input_nodes)]
    flat = [item for value in recorded for item in (value if isinstance(value, list | tuple) else [value])]
    return any(isinstance(item, torch.Tensor) and item.is_complex() for item in flat)


def _used_results(node: fx.Node, count: int) -> frozenset[int]:
    """Return the indices of the results of a call that are read."""
    used: set[int] = set()
    for user in node.users:
        index: Any = user.args[1] if user.target is operator.getitem else None
        used |= set(range(count)) if index is None else {index % count}
    return frozenset(used)


def origin_of(node: fx.Node) -> str:
    """Return the path of the module that makes the call (gradients: the forward call), such as ``layer1.0.conv1``.

    A call in the ``forward`` of a module that is not PyTorch's own has its line, too: ``layer1.0 (nets.py:14)``, or
    ``nets.py:14`` in that of the outermost module.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "")
    path = str(path)
    if "[" in path:  # strict export may spell it as Python, with the name of the argument: L['self'].layer1[0].conv1
        path = re.sub(r"^L\['\w+'\]\.?", "", path)
        path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    path = path.lstrip(".")
    name = kind if isinstance(kind, str) else getattr(kind, "__module__", "")
    line = "" if name.startswith("torch.nn.") else _line_of(node)
    return f"{path} ({line})" if path and line else path or line


def _line_of(node: fx.Node) -> str:
    """Return file and line of a call: the innermost frame outside of PyTorch's own files; empty if none is recorded."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = (f"{PurePath(file).name}:{line}" for file, line in reversed(frames) if not file.startswith((_TORCH, "<")))
    return next(own, "")


def _where(node: fx.Node) -> str:
    origin = origin_of(node)
    return f"{node.name} in {origin}" if origin else str(node.name)
