"""Programs that change tensors in place, prepared for PyTorch's rules that make them functional.

Three of these rules differ from eager PyTorch: one copies where eager shares memory, some functional forms of in-place
calls forget the strides of their tensor, and a change of windows (``unfold``) sets the elements outside of them to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem, setitem
from typing import Any

import torch
from torch import fx

from fmtprop.capture.fx_import import copied, is_in_place
from fmtprop.errors import ImportModelError
from fmtprop.ops.pytorch import OpOverload, is_alias

#: errors of PyTorch's tracers about in-place calls that eager PyTorch computes
_REFUSALS = ("Cannot view a tensor", "modified by an inplace operation")

ALIAS, _DROPOUT = torch.ops.aten.alias.default, torch.ops.aten.dropout.default
_SLICE, _PARTS, _MOVE = torch.ops.aten.slice.Tensor, torch.ops.aten.unflatten.int, torch.ops.aten.movedim.int
_UNFOLD = torch.ops.aten.unfold.default


def with_aliases(module: fx.GraphModule) -> fx.GraphModule:
    """Return a program in which dropout that is off is its source, as in eager; PyTorch 2.13's rule is a copy.

    They differ if one of both is changed in place: without such a call, the program stays.
    """
    nodes = _nodes(module)
    return _changed(module, _alias) if any(map(_is_off, nodes)) and any(map(_writes, nodes)) else module


def with_windows(module: fx.GraphModule) -> fx.GraphModule:
    """Return a program in which PyTorch's rules can write the windows of ``unfold``: they are parts of a slice."""
    nodes = _nodes(module)
    if not any(map(_is_unfold, nodes)) or not any(map(_changes, nodes)):
        return module
    made = _changed(module, _write_windows)
    for node in _nodes(made):
        if _changes(node) and _shows_windows(node.args[0]):
            raise ImportModelError(
                f"{node.name} changes windows of a tensor (unfold) in place, and PyTorch's rule that makes this "
                "functional is wrong where windows overlap or leave elements out: change slices of the tensor"
            )
    return made


def with_copies(module: fx.GraphModule, error: Exception) -> fx.GraphModule | None:
    """Return a program in which a copy of a functional form replaces each in-place call, after a refusal of PyTorch's.

    The result is None after another error, and for a program without in-place calls. The functional forms read copies,
    so gradients read no changed tensor. PyTorch passes a change of a view on to the tensor that it shows. It cannot
    where the view is a transposed one and the functional form returns a row-major tensor (``masked_fill``, ``scatter``,
    ``cumsum``); a copy keeps strides.
    """
    is_refused = any(text in str(error) for text in _REFUSALS) and any(functional_form(node) for node in _nodes(module))
    return _changed(module, _copy) if is_refused else None


def _nodes(module: fx.GraphModule) -> list[fx.Node]:
    return [node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]


def _changed(module: fx.GraphModule, change: Callable[[fx.Node], None]) -> fx.GraphModule:
    graph = copied(module.graph)
    for node in list(graph.nodes):
        change(node)
    made = fx.GraphModule(module, graph)
    made.meta = module.meta
    for name, part in module.named_children():
        if isinstance(part, fx.GraphModule):
            setattr(made, name, _changed(part, change))
    return made


def _alias(node: fx.Node) -> None:
    if _is_off(node):
        node.target, node.args = ALIAS, node.args[:1]


def _is_off(node: fx.Node) -> bool:
    """Return whether a call is a dropout that drops nothing: outside of training, or with a probability of 0."""
    return node.target is _DROPOUT and (node.args[2:] == (False,) or node.args[1] in (0,))


def _writes(node: fx.Node) -> bool:
    """Return whether a call changes a tensor in place, in an exported or in a captured program."""
    is_copy = node.op == "call_method" and node.target == "copy_"
    return is_copy or node.target is setitem or is_in_place(node)


def _changes(node: fx.Node) -> bool:
    return bool(node.args) and (_writes(node) or functional_form(node) is not None)


def _is_unfold(node: fx.Node) -> bool:
    return node.target is _UNFOLD or (node.op == "call_method" and node.target == "unfold")


def _write_windows(node: fx.Node) -> None:
    if not _is_unfold(node) or (parts := _parts(*node.args)) is None:
        return
    source, (axis, count, size, step) = node.args[0], parts

    def call(target: OpOverload, *args: Any) -> fx.Node:
        return node.graph.call_function(target, args)

    with node.graph.inserting_before(node):
        whole = call(_SLICE, source, axis, 0, count * step)
        made = call(_MOVE, call(_SLICE, call(_PARTS, whole, axis, [count, step]), axis + 1, 0, size), axis + 1, -1)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _parts(source: Any, axis: Any = 0, size: Any = 0, step: Any = 0) -> tuple[int, int, int, int] | None:
    """Return axis, number, size and step of windows that are equal parts of a slice; None for others."""
    tensor = _tensor(source)
    if tensor is None or not tensor.ndim or not all(isinstance(n, int) and n > 0 for n in (size, step, *tensor.shape)):
        return None
    length = tensor.shape[axis]
    count = (length - size) // step + 1
    step = size if count == 1 else step
    return (axis % tensor.ndim, count, size, step) if size <= step and count * step <= length else None


def _shows_windows(node: object) -> bool:
    """Return whether a tensor is a view of windows, or they themselves."""
    while isinstance(node, fx.Node) and not _is_unfold(node):
        if not node.args or not _is_view(node):
            return False
        node = node.args[0]
    return isinstance(node, fx.Node)


def _is_view(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return any(result.alias_info is not None for result in node.target._schema.returns)
    tensor, source = _tensor(node), _tensor(node.args[0])
    if tensor is None or source is None:
        return False
    # a part of several results: they tell whether these are views
    is_part = node.target is getitem and not isinstance(_value(node.args[0]), torch.Tensor)
    return is_part or is_alias(tensor, source)


def shows_a_source(node: fx.Node) -> bool:
    """Return whether a call's result shares memory with an operand, as recorded."""
    made = _tensor(node)
    read = [tensor for tensor in map(_tensor, node.all_input_nodes) if tensor is not None]
    return made is not None and any(is_alias(made, tensor) for tensor in read)


def _tensor(node: object) -> torch.Tensor | None:
    """Return a node's tensor without data, or the first one of several."""
    found = _value(node)
    found = found[0] if isinstance(found, list | tuple) and found else found
    return found if isinstance(found, torch.Tensor) else None


def _value(node: object) -> object:
    """Return what is recorded of a node's results, in an exported or in a captured program."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, fx.Node) else None


def _copy(node: fx.Node) -> None:
    if (functional := functional_form(node)) is None:
        return
    first, *others = node.args
    clone = "clone" if node.op == "call_method" else torch.ops.aten.clone.default
    with node.graph.inserting_before(node):
        old = node.graph.create_node(node.op, clone, (first,))
        new = node.graph.create_node(node.op, functional, (old, *others), node.kwargs)
    old.meta, new.meta = dict(node.meta), dict(node.meta)
    node.target = "copy_" if node.op == "call_method" else torch.ops.aten.copy_.default
    node.args, node.kwargs = (first, new), {}


def functional_form(node: fx.Node) -> str | OpOverload | None:
    """Return the functional form of an in-place call of PyTorch's, None for other calls and for ``copy_``."""
    if node.op == "call_method":
        name = str(node.target)
        form = name.removesuffix("_")
        return form if form not in (name, "copy") and hasattr(torch.Tensor, form) else None
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    form = name.removesuffix("_")
    if form in (name, "copy") or not node.args:
        return None
    return getattr(getattr(torch.ops.aten, form, None), target._overloadname, None)
