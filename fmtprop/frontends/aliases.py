"""Results that share memory with their source in eager PyTorch, but not by PyTorch's rules for functional programs."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from fmtprop.frontends.fx_import import copied

_ALIAS, _DROPOUT = torch.ops.aten.alias.default, torch.ops.aten.dropout.default


def with_aliases(module: fx.GraphModule) -> fx.GraphModule:
    """Return a program in which dropout that is off is its source, as in eager; PyTorch 2.13's rule is a copy.

    They differ if one of both is changed in place: without such a call, the program stays.
    """
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes]
    return _with_aliases(module) if any(map(_is_off, nodes)) and any(map(_writes, nodes)) else module


def _is_off(node: fx.Node) -> bool:
    """Return whether a call is a dropout that drops nothing: outside of training, or with a probability of 0."""
    return node.target is _DROPOUT and (node.args[2:] == (False,) or node.args[1] in (0,))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _with_aliases(module: fx.GraphModule) -> fx.GraphModule:
    graph = copied(module.graph)
    for node in filter(_is_off, graph.nodes):
        node.target, node.args = _ALIAS, node.args[:1]
    made = fx.GraphModule(module, graph)
    made.meta = module.meta
    for name, part in module.named_children():
        if isinstance(part, fx.GraphModule):
            setattr(made, name, _with_aliases(part))
    return made
