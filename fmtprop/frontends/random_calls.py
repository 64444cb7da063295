"""Random numbers of a training step: drawn before the graph runs, which is a function of its inputs.

Owns which calls can be drawn so, and how; a graph has an input for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fmtprop.errors import ImportModelError
from fmtprop.ops.host_call import draws_random_numbers

__all__ = ["Draw", "drawer", "drawn_first"]

#: draws the numbers of one call
Draw = Callable[[], torch.Tensor]

_aten = torch.ops.aten

#: calls that draw numbers and read nothing of a tensor but its shape
_DRAWS = frozenset(
    f"aten.{name}"
    for name in (
        *("bernoulli.p", "rand.default", "rand_like.default", "randn.default", "randn_like.default"),
        *("randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype", "randperm.default"),
        *("uniform.default", "normal_functional.default", "normal.float_float", "exponential.default"),
    )
)


def _noise(src: torch.Tensor, p: float) -> torch.Tensor:
    """Return what dropout multiplies by: 0 with probability p, else what keeps the mean."""
    kept = torch.empty(src.shape, dtype=torch.bool, device="cpu").bernoulli_(1 - p)
    return kept.to(src.dtype).mul_(0.0 if p == 1 else 1 / (1 - p))


def drawn_first(program: fx.GraphModule) -> fx.GraphModule:
    """Return the program with dropouts as products with numbers that a call of its own draws.

    Parameters
    ----------
    program : torch.fx.GraphModule
        The forward or the backward half of a step; it is not changed. What the forward saves of a dropout is the
        numbers then.
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
    """Return what draws the numbers of a call; None where it draws none.

    Raises
    ------
    ImportModelError
        It draws numbers for which other values have to be known.
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
    """Return a tensor of the shape of an argument that is one; it takes no memory."""
    if not isinstance(argument, fx.Node):
        return argument
    like = argument.meta["val"]
    return torch.empty([1] * like.ndim, dtype=like.dtype, device="cpu").expand(like.shape)
