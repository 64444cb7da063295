"""A captured graph in pieces: plans for calls with fixed sizes, and PyTorch between them.

A decoder's step reads and grows its cache: a few calls of each layer have sizes that change with each token, or write
to the caller's tensors. These run in PyTorch, on the caller's own memory. All others have fixed sizes, so their plans
serve every length. Owns the distribution of calls to pieces, and their order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fmtprop.capture.binding import is_dense
from fmtprop.capture.call_import import importers
from fmtprop.capture.fx_import import base_of, copied, is_in_place, placeholders, results_of
from fmtprop.capture.random_calls import is_random
from fmtprop.ir.op import opdef
from fmtprop.ops.host_call import WritingPart, in_place_form

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """Some calls of a graph, which run one after the other."""

    #: the calls; its arguments are values from before, its results the values that are read later
    module: fx.GraphModule
    #: positions of the arguments that are constants as long as they are not changed
    constants: frozenset[int]
    #: `reads`, `writes`: the names of the arguments and of the results in the whole graph
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    #: whether a plan may run it
    is_ours: bool
    #: positions of the arguments whose new contents are the module's last results
    changed: tuple[int, ...] = ()
    #: the form for PyTorch, if it is another one: it changes these arguments itself
    in_pytorch: fx.GraphModule | None = None


class Pieces:
    """The pieces of a graph, ready to be called by AOTAutograd, with a list of inputs.

    `runs`: the executors of the pieces, in order; each takes a list of arguments.
    """

    _boxed_call = True

    def __init__(self, module: fx.GraphModule, runs: Sequence[tuple[Callable[[list[Any]], Sequence[Any]], Piece]]):
        places = {node.name: place for place, node in enumerate(placeholders(module))}
        for _, piece in runs:
            for name in piece.writes:
                places.setdefault(name, len(places))
        self._runs = [
            (run, [places[name] for name in piece.reads], [places[name] for name in piece.writes])
            for run, piece in runs
        ]
        results: Any = results_of(module)
        self._results = [places[r.name] if isinstance(r, fx.Node) else None for r in results]
        self._fixed = [None if isinstance(r, fx.Node) else r for r in results]
        self._later = len(places) - len(placeholders(module))

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the pieces in their order."""
        values = [*args, *(None,) * self._later]
        for run, reads, writes in self._runs:
            for place, value in zip(writes, run([values[i] for i in reads]), strict=True):
                values[place] = value
        return [
            fixed if place is None else values[place] for place, fixed in zip(self._results, self._fixed, strict=True)
        ]


#: types of integers that codes are kept in
_CODES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32})


def without_writes(module: fx.GraphModule) -> Piece | None:
    """Return all of a graph as one piece, which gives the new contents of inputs as its last results.

    AOTAutograd copies them to the inputs at the end. None if there is another write, or if an input has gaps
    between its elements: a plan would copy it.
    """
    module = fx.GraphModule(module, copied(module.graph))
    inputs = {node: place for place, node in enumerate(placeholders(module))}
    changed: dict[int, fx.Node] = {}
    for node in filter(_writes, _calls(module)):
        target: Any = node.args[0]
        content: Any = node.args[1]
        is_last = node.target is _ATEN.copy_.default and all(user.op == "output" for user in node.users)
        if not is_last or target not in inputs or inputs[target] in changed or not _may_be_changed(target, content):
            return None
        changed[inputs[target]] = content
        node.replace_all_uses_with(target)
        module.graph.erase_node(node)
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.args = ((*results_of(module), *changed.values()),)
    module.recompile()
    return Piece(module, frozenset(), (), (), is_ours=True, changed=tuple(changed))


def _may_be_changed(target: fx.Node, content: fx.Node) -> bool:
    old, new = target.meta["val"], content.meta["val"]
    alike = old.dtype is new.dtype and str(old.shape) == str(new.shape)  # comparing symbols would fix them
    return alike and (is_symbolic(old) or is_dense(old))


def parted(module: fx.GraphModule, constants: frozenset[int], *, own_views: bool = False) -> list[Piece]:
    """Return the pieces of a graph, in order; one piece if plans can run all of it.

    `own_views`: whether each piece makes the views of constants that it reads. Then its weights are constants of its
    plan, which keeps them in a form of its own, such as codes. Otherwise the first piece makes all views, and later
    ones read the caller's memory.

    Calls with symbolic sizes are in PyTorch's pieces only if products of weights have fixed sizes, as in a decoder's
    step. Otherwise a plan for each size is the better way. New contents of inputs are no reason for several pieces.
    """
    by_shape = not has_fixed_products(module, constants)
    calls = list(_calls(module))
    random = {node for node in calls if is_random(node)}
    theirs = {n for n in calls if n in random or _writes(n) or (not by_shape and _meets_symbols(n))}
    if not theirs:
        return [Piece(module, constants, (), (), is_ours=True)]
    known = {node for place, node in enumerate(placeholders(module)) if place in constants}
    views = _views_of(known, set(calls) - theirs) if own_views else set()
    levels: dict[fx.Node, int] = {}
    drawn = 0
    for node in calls:
        if node in views:
            continue
        before = [levels[source] for source in node.all_input_nodes if source in levels]
        if node.target is operator.getitem and before:
            levels[node] = before[0]
            continue
        level = max([*before, drawn] if node in random else before, default=0)
        levels[node] = level + (level % 2 != (node in theirs))
        drawn = levels[node] if node in random else drawn  # random numbers keep their order
    last = max(levels.values()) | 1
    for node in calls:
        if node.target is _ATEN.copy_.default and all(user.op == "output" for user in node.users):
            levels[node] = last  # after all readers of the old numbers
    groups = [[node for node in levels if levels[node] == level] for level in range(last + 1)]
    if sum(map(bool, groups)) == 1:  # the caller passes all inputs, read or not
        return [Piece(module, constants, (), (), is_ours=False)]
    return [_piece(module, known, views, group, level % 2 == 0) for level, group in enumerate(groups) if group]


def has_codes(module: fx.GraphModule, constants: frozenset[int]) -> bool:
    """Return whether a constant is a matrix of integers of at most 32 bits, as codes of weights are."""
    known = [node.meta.get("val") for place, node in enumerate(placeholders(module)) if place in constants]
    return any(isinstance(one, torch.Tensor) and one.ndim > 1 and one.dtype in _CODES for one in known)


def _views_of(constants: set[fx.Node], calls: set[fx.Node]) -> set[fx.Node]:
    """Return the calls that read constants alone, directly or through each other, and give no results of the graph."""
    found: set[fx.Node] = set()
    for node in next(iter(constants)).graph.nodes if constants else ():
        sources = node.all_input_nodes
        read_inside = all(user.op != "output" for user in node.users)
        if node in calls and sources and read_inside and all(one in constants or one in found for one in sources):
            found.add(node)
    return found


def _piece(
    module: fx.GraphModule, known: set[fx.Node], views: set[fx.Node], group: Sequence[fx.Node], is_ours: bool
) -> Piece:
    graph, inside, made, reads = fx.Graph(), set(group), dict[fx.Node, fx.Node](), list[str]()

    def read(source: fx.Node) -> fx.Node:
        if source.op == "get_attr":
            made[source] = graph.node_copy(source)
        elif source in views:
            made[source] = graph.node_copy(source, read_or_made)
        elif source not in made:
            made[source] = graph.placeholder(source.name)
            made[source].meta = source.meta
            reads.append(source.name)
        return made[source]

    def read_or_made(source: fx.Node) -> fx.Node:
        return made[source] if source in made else read(source)

    def read_inputs(node: fx.Node) -> None:
        """Make the arguments that a call reads: they come before all calls."""
        for source in node.all_input_nodes:
            if source in views:
                read_inputs(source)
            elif source not in inside and source.op != "get_attr":
                read(source)

    for node in group:
        read_inputs(node)
    for node in group:
        made[node] = graph.node_copy(node, read_or_made)
    written = [node for node in group if any(user not in inside for user in node.users)]
    graph.output(tuple(made[node] for node in written))
    names_of_constants = {node.name for node in known}
    constants = frozenset(place for place, name in enumerate(reads) if name in names_of_constants)
    names = tuple(node.name for node in written)
    return Piece(fx.GraphModule(module, graph), constants, tuple(reads), names, is_ours)


# ---------------------------------------------------------------- equal calls


def without_repeats(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with one call for all equal ones: each layer of a decoder makes the same mask.

    Results of the graph keep memory of their own.
    """
    module = fx.GraphModule(module, copied(module.graph))
    own = {base_of(one) for one in results_of(module) if isinstance(one, fx.Node)}
    known: dict[object, fx.Node] = {}
    for node in _calls(module):
        if _writes(node) or is_random(node) or base_of(node) in own:
            continue
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    module.recompile()
    return module


# ---------------------------------------------------------------- writing in place


def in_place(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with functions that write directly to an input, if no other call reads its old numbers.

    AOTAutograd makes a copy of a changed input and, at the end, copies it back. A cache has many rows, and a step
    writes one of them.
    """
    module = fx.GraphModule(module, copied(module.graph))
    for copy in [node for node in _calls(module) if node.target is _ATEN.copy_.default]:
        target: Any = copy.args[0]
        source: Any = copy.args[1]
        writer = in_place_form(source.target) if _is_read_by(target, source, copy) else None
        if writer is None:
            continue
        with module.graph.inserting_before(source):
            made: fx.Node = module.graph.call_function(writer, source.args, source.kwargs)
        made.meta = source.meta
        for old in (copy, source):
            old.replace_all_uses_with(made)
        module.graph.erase_node(copy)
        module.graph.erase_node(source)
    module.recompile()
    return module


def _is_read_by(target: fx.Node, source: fx.Node, copy: fx.Node) -> bool:
    """Return whether a source changes the target, its first argument, and only the copy reads the target otherwise."""
    first, *others = source.args or (None,)
    if first is not target or target in others or set(target.users) != {source, copy}:
        return False
    old, new = target.meta["val"], source.meta["val"]
    return old.dtype is new.dtype and str(old.shape) == str(new.shape)  # comparing symbols would fix them


# ---------------------------------------------------------------- properties of calls


def is_symbolic(value: Any) -> bool:
    """Return whether a recorded value, or one of its sizes, is known only at the call."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if isinstance(value, list | tuple):
        return any(map(is_symbolic, value))
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _meets_symbols(node: fx.Node) -> bool:
    return any(is_symbolic(one.meta.get("val")) for one in (node, *node.all_input_nodes))


def has_fixed_products(module: fx.GraphModule, constants: frozenset[int]) -> bool:
    """Return whether there are products of constants, and all of them have fixed sizes."""
    fixed = {node for place, node in enumerate(placeholders(module)) if place in constants}
    found = False
    for node in _calls(module):
        sources = node.all_input_nodes
        if sources and all(source in fixed for source in sources):
            fixed.add(node)
        elif _is_product(node) and any(source in fixed for source in sources):
            if _meets_symbols(node):
                return False
            found = True
    return found


def _is_product(node: fx.Node) -> bool:
    found = importers().get(str(node.target))
    return found is not None and opdef(found[0]).linear is not None


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, WritingPart) or is_in_place(node)


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in list(module.graph.nodes) if node.op == "call_function")
