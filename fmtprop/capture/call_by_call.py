"""Exported programs made functional call by call, where PyTorch would trace the whole program again.

``run_decompositions`` takes a fifth to a quarter of the time in which a model is compiled. Most programs need little of
it: a composite call that may be a view (``reshape``, ``flatten``, dropout that is off) becomes the calls that it makes,
and an in-place call on a tensor that nothing else shows becomes its functional form. Where a call needs more than
this, such as a change of a view or of an argument, there is no result, and PyTorch does it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import add, getitem, mul
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fmtprop.capture.fx_import import copied, is_in_place
from fmtprop.capture.in_place import ALIAS, functional_form
from fmtprop.ops.pytorch import OpOverload, TorchDispatchMode, is_traceable_wrapper_subclass, tree_map_only

_ATEN = torch.ops.aten
_BATCH_NORM, _SIZE = _ATEN.batch_norm.default, _ATEN.sym_size.int

#: the check of a type that is known; PyTorch drops it, too
_CHECKED = _ATEN._assert_tensor_metadata.default


class _LeftToPyTorch(Exception):
    """A call needs PyTorch's own way."""


def made_functional(program: ExportedProgram) -> ExportedProgram | None:
    """Return a program without composite views and in-place calls; None where PyTorch must make it."""
    tensors = (*program.state_dict.values(), *program.constants.values())
    are_wrappers = any(map(is_traceable_wrapper_subclass, tensors))  # such as torchao's weights
    if are_wrappers or any(True for _ in program.graph_module.named_children()):
        return None
    graph = copied(program.graph)
    for spec, node in zip(program.graph_signature.input_specs, graph.find_nodes(op="placeholder"), strict=True):
        node.name = spec.arg.name  # a copy renames "input", which is a function of Python's, too
    try:
        _ProgramRewrite(graph).run()
    except _LeftToPyTorch:
        return None
    graph.eliminate_dead_code()
    made = copy.copy(program)
    made._graph_module = fx.GraphModule(program.graph_module, graph)
    made._graph_module.meta = program.graph_module.meta
    made._graph_signature = _renamed(program, graph)
    return made


def _renamed(program: ExportedProgram, graph: fx.Graph) -> Any:
    """Return the signature with the names of the nodes that are results now."""
    specs, results = program.graph_signature.output_specs, graph.output_node().args[0]
    named = [
        replace(spec, arg=replace(spec.arg, name=node.name)) if isinstance(node, fx.Node) else spec
        for spec, node in zip(specs, results, strict=True)  # type: ignore[arg-type]
    ]
    return replace(program.graph_signature, output_specs=named)


class _ProgramRewrite:
    """The rewrite of one program's graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        #: the nodes that show each piece of memory, by its address in PyTorch
        self._showing: defaultdict[int, list[fx.Node]] = defaultdict(list)
        #: each call's place in the program
        self._places: dict[fx.Node, int] = {}

    def run(self) -> None:
        """Rewrite each call that needs it.

        Raises
        ------
        _LeftToPyTorch
            A call needs PyTorch's own way.
        """
        results, in_place = self._graph.output_node().args[0], []
        for place, node in enumerate(list(self._graph.nodes)):
            self._places[node], target = place, node.target
            if node.op == "output":
                continue
            if node.op == "call_function" and target is not getitem:
                if target is _CHECKED:
                    self._graph.erase_node(node)
                    continue
                if not _tensors(node.meta.get("val")) and not is_in_place(node):
                    continue  # a size, or a check of sizes
                if not isinstance(target, OpOverload) or not _has_known_sizes(node):
                    raise _LeftToPyTorch
                if _may_be_view(node):
                    self._take_apart(node)
                    continue
                if is_in_place(node):
                    in_place.append(node)
            self._note(node)
        for node in in_place:
            self._change(node)
        for before, after in zip(results, self._graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
            if after is not before and getattr(after, "op", "") == "placeholder":
                raise _LeftToPyTorch  # what is returned would be the caller's own tensor

    def _note(self, node: fx.Node) -> None:
        """Note the memory that a node shows."""
        if node.target is ALIAS:  # it was a dropout, and what is recorded is a copy
            (source,) = node.all_input_nodes
            self._showing[_memory_of(node.meta["val"])] = self._showing[_memory_of(source.meta["val"])]
        for tensor in _tensors(node.meta.get("val")):
            self._showing[_memory_of(tensor)].append(node)

    def _take_apart(self, node: fx.Node) -> None:
        """Replace a composite call by the calls that it makes, or by its source if it makes none."""
        target: Any = node.target
        if not target._can_decompose():
            raise _LeftToPyTorch
        recorder = _PartsRecorder(node)
        result = recorder.result_of(target.decompose)
        if isinstance(result, torch.Tensor):
            recorder.put(result, node)
        else:
            for user in list(node.users):
                if user.target is not getitem:
                    raise _LeftToPyTorch
                recorder.put(result[user.args[1]], user)
            self._graph.erase_node(node)
        self._put(recorder.made, self._places[node])

    def _put(self, nodes: Iterable[fx.Node], place: int) -> None:
        for node in nodes:
            self._places[node] = place
            self._note(node)

    def _change(self, node: fx.Node) -> None:
        """Replace an in-place call by its functional form, and its source behind it by the result."""
        source, form = node.args[0], functional_form(node)
        if not isinstance(source, fx.Node) or not isinstance(form, OpOverload) or node.kwargs.get("out") is not None:
            raise _LeftToPyTorch
        if torch.Tag.nondeterministic_seeded in form.tags or form._schema.is_mutable:
            raise _LeftToPyTorch
        tensor = source.meta.get("val")
        if source.op == "placeholder" or source.target is getitem or not isinstance(tensor, torch.Tensor):
            raise _LeftToPyTorch
        place, showing = self._places[node], self._showing[_memory_of(tensor)]
        for one in showing:
            read_later = [user for user in one.users if self._places[user] > place]
            is_other = one not in (source, node) and self._places[one] <= place
            if one.op == "placeholder" or (is_other and read_later):
                raise _LeftToPyTorch  # it shows the change, too
        recorder = _PartsRecorder(node)
        result = recorder.result_of(form)
        if not _are_alike(result, tensor):
            raise _LeftToPyTorch
        made = recorder.put(result, node)
        self._put((*recorder.made, made), place)
        source.replace_all_uses_with(made, lambda user: self._places[user] > place)


class _PartsRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the calls that a function makes of a node's arguments, as nodes before it."""

    def __init__(self, at: fx.Node) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at = at
        self.made: list[fx.Node] = []
        self._nodes: dict[int, fx.Node] = {}
        #: nodes of symbolic sizes, by their expressions
        self._sizes: dict[Any, Any] = {}
        #: what was recorded: an address tells a tensor as long as there is one
        self._kept: list[torch.Tensor] = []
        for node in at.all_input_nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._sizes[value.node.expr] = node
                continue
            if not isinstance(value, torch.Tensor) or id(value) in self._nodes:
                raise _LeftToPyTorch
            self._know(value, node)
        if not self._kept:
            raise _LeftToPyTorch

    def result_of(self, function: Callable[..., Any]) -> Any:
        """Call a function with the node's arguments, tensors without data."""
        args, kwargs = fx.map_arg((self._at.args, self._at.kwargs), lambda node: node.meta["val"])
        try:
            with self._kept[0].fake_mode, torch.no_grad(), self:  # type: ignore[attr-defined]
                return function(*args, **kwargs)
        except Exception as error:  # an operator's own code may raise anything; in a second trace, with a remedy
            raise _LeftToPyTorch from error

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of an argument or a recorded result."""
        if id(tensor) not in self._nodes:
            raise _LeftToPyTorch
        return self._nodes[id(tensor)]

    def size_of(self, size: torch.SymInt) -> Any:
        """Return the node of a symbolic size, or its number."""
        return self._computed(size.node.expr, size.node.shape_env)

    def _computed(self, expression: Any, symbols: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression not in self._sizes:
            call = next(self._axes(expression), None)
            if call is None:
                function = mul if expression.is_Mul else add if expression.is_Add else None
                if function is None:
                    raise _LeftToPyTorch
                call = function, tuple(self._computed(one, symbols) for one in expression.as_two_terms())
            with self._at.graph.inserting_before(self._at):
                size = symbols.create_symintnode(expression, hint=None)
                self._sizes[expression] = self._add(self._at.graph.call_function(*call), size)
        return self._sizes[expression]

    def _axes(self, expression: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yield calls that return a size of a tensor that is known."""
        for tensor in self._kept:
            sizes: list[Any] = list(tensor.shape)
            for axis, size in enumerate(sizes):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    yield _SIZE, (self._nodes[id(tensor)], axis)

    def put(self, result: torch.Tensor, node: fx.Node) -> fx.Node:
        """Replace a node by a result's, which takes over what is recorded: others' tensors may share its memory."""
        made = self.node_of(result)
        if made in self.made:
            made.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(made)
        node.graph.erase_node(node)
        return made

    def _know(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            raise _LeftToPyTorch
        result = func(*args, **(kwargs or {}))
        given = tree_map_only(torch.Tensor, self.node_of, (args, dict(kwargs or {})))
        given = tree_map_only(torch.SymInt, self.size_of, given)
        with self._at.graph.inserting_before(self._at):
            node = self._add(self._at.graph.call_function(func, *given), result)
            if isinstance(result, list | tuple):
                for index, tensor in enumerate(result):
                    part = self._add(self._at.graph.call_function(getitem, (node, index)), tensor)
                    self._know(tensor, part)
            elif isinstance(result, torch.Tensor) and id(result) not in self._nodes:
                self._know(result, node)
        return result

    def _add(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta = {**self._at.meta, "val": value}
        self.made.append(node)
        return node


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, torch.Tensor)]


def _has_known_sizes(node: fx.Node) -> bool:
    """Return whether a node's results are tensors whose sizes depend on sizes alone."""
    value = node.meta.get("val")
    found = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, torch.Tensor) and not any(map(_depends_on_data, one.shape)) for one in found)


def _depends_on_data(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def _may_be_view(node: fx.Node) -> bool:
    """Return whether a composite call may return what it is given, or a view of it, as PyTorch declares it."""
    target: Any = node.target
    if target is _BATCH_NORM:  # with given statistics, it is none, and stays whole
        return node.args[5:6] != (False,) or None in node.args[3:5]
    aliases = any(one.alias_info is not None for one in target._schema.arguments)
    is_foreign = target.namespace not in ("aten", "prims", "fmtprop")
    return torch.Tag.maybe_aliasing_or_mutating in target.tags or (target._can_decompose() and (aliases or is_foreign))


def _are_alike(made: Any, tensor: torch.Tensor) -> bool:
    """Return whether a functional form's result has the type and the format of the tensor that it replaces."""
    return (
        isinstance(made, torch.Tensor)
        and (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    )  # fmt: skip
