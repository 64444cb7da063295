"""Programs that change tensors in place, prepared for PyTorch's rules that make them functional.

Two of these rules differ from eager PyTorch: one copies where eager shares memory, and some functional forms of
in-place calls forget the strides of their tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._ops import OpOverload

from fmtprop.frontends.fx_import import copied

#: errors of PyTorch's tracers about in-place calls that eager PyTorch computes
_REFUSALS = ("Cannot view a tensor", "modified by an inplace operation")

_ALIAS, _DROPOUT = torch.ops.aten.alias.default, torch.ops.aten.dropout.default


def with_aliases(module: fx.GraphModule) -> fx.GraphModule:
    """Return a program in which dropout that is off is its source, as in eager; PyTorch 2.13's rule is a copy.

    They differ if one of both is changed in place: without such a call, the program stays.
    """
    nodes = _nodes(module)
    return _changed(module, _alias) if any(map(_is_off, nodes)) and any(map(_writes, nodes)) else module


def with_copies(module: fx.GraphModule, error: Exception) -> fx.GraphModule | None:
    """Return a program in which a copy of a functional form replaces each in-place call, after a refusal of PyTorch's.

    The result is None after another error, and for a program without in-place calls. The functional forms read copies,
    so gradients read no changed tensor. PyTorch passes a change of a view on to the tensor that it shows. It cannot
    where the view is a transposed one and the functional form returns a row-major tensor (``masked_fill``, ``scatter``,
    ``cumsum``); a copy keeps strides.
    """
    is_refused = any(text in str(error) for text in _REFUSALS) and any(_functional(node) for node in _nodes(module))
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
        node.target, node.args = _ALIAS, node.args[:1]


def _is_off(node: fx.Node) -> bool:
    """Return whether a call is a dropout that drops nothing: outside of training, or with a probability of 0."""
    return node.target is _DROPOUT and (node.args[2:] == (False,) or node.args[1] in (0,))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _copy(node: fx.Node) -> None:
    if (functional := _functional(node)) is None:
        return
    first, *others = node.args
    clone = "clone" if node.op == "call_method" else torch.ops.aten.clone.default
    with node.graph.inserting_before(node):
        old = node.graph.create_node(node.op, clone, (first,))
        new = node.graph.create_node(node.op, functional, (old, *others), node.kwargs)
    old.meta, new.meta = dict(node.meta), dict(node.meta)
    node.target = "copy_" if node.op == "call_method" else torch.ops.aten.copy_.default
    node.args, node.kwargs = (first, new), {}


def _functional(node: fx.Node) -> str | OpOverload | None:
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
