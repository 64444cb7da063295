"""Random numbers of a training step: they are drawn before the graph runs, and the graph has an input for each call.

Owns the list of calls that can be drawn in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fmtprop.errors import ImportModelError
from fmtprop.ops.host_call import draws_random_numbers

__all__ = ["Draw", "drawer", "drawn_first"]

#: a function that draws the numbers of one call
Draw = Callable[[], torch.Tensor]

_aten = torch.ops.aten

#: calls that draw numbers and read only the shape of a tensor
_DRAWS = frozenset(
    f"aten.{name}"
    for name in (
        *("bernoulli.p", "rand.default", "rand_like.default", "randn.default", "randn_like.default"),
        *("randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype", "randperm.default"),
        *("uniform.default", "normal_functional.default", "normal.float_float", "exponential.default"),
    )
)


def _noise(src: torch.Tensor, p: float) -> torch.Tensor:
    """Return dropout's factors: 0 with probability p, else 1 / (1 - p), which keeps the mean."""
    kept = torch.empty(src.shape, dtype=torch.bool, device="cpu").bernoulli_(1 - p)
    return kept.to(src.dtype).mul_(0.0 if p == 1 else 1 / (1 - p))


def drawn_first(program: fx.GraphModule) -> fx.GraphModule:
    """Return the program with each dropout as a product with random numbers, which a separate call draws.

    Parameters
    ----------
    program : torch.fx.GraphModule
        The forward or the backward half of a step; it is not changed. The forward then saves the numbers of a
        dropout instead of its mask.
    """
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    parts: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in program.graph.nodes:
        if node.target is _aten.native_dropout.default and node.args[2] is not False:
            src = values[node.args[0]]
            noise = _call(graph, _noise, (src, node.args[1]), node.args[0])
            parts[node] = _call(graph, _aten.mul.Tensor, (src, noise), node), noise
        elif node.args and node.args[0] in parts:  # one of the two results
            values[node] = parts[node.args[0]][node.args[1]]
        elif node.target is _aten.native_dropout_backward.default:
            grad, noise = (values[argument] for argument in node.args[:2])
            values[node] = _call(graph, _aten.mul.Tensor, (grad, noise), node)
            noise.meta["val"] = node.meta["val"]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    return fx.GraphModule(program, graph)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    value = like.meta["val"]
    node.meta = {**like.meta, "val": value[0] if isinstance(value, tuple | list) else value}
    return node


def drawer(node: fx.Node) -> Draw | None:
    """Return a function that draws the numbers of a call; None if the call draws none.

    Raises
    ------
    ImportModelError
        The numbers depend on values of the model.
    """
    if node.target is not _noise:
        if not isinstance(node.target, torch._ops.OpOverload) or not draws_random_numbers(node.target, node.kwargs):
            return None
        if str(node.target) not in _DRAWS:
            raise ImportModelError(
                f"{node.name}: {node.target} draws random numbers that depend on values of the model; use dropout, or "
                "draw them outside and pass them as an input"
            )
    target: Any = node.target
    args, kwargs = [_stand_in(argument) for argument in node.args], node.kwargs
    return lambda: target(*args, **kwargs)


def _stand_in(argument: Any) -> Any:
    """Return an argument; a tensor is replaced by one of its shape that takes no memory."""
    if not isinstance(argument, fx.Node):
        return argument
    like = argument.meta["val"]
    return torch.empty([1] * like.ndim, dtype=like.dtype, device="cpu").expand(like.shape)
