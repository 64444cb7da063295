"""Random numbers of a training step: they are drawn before the graph runs, and the graph has an input for each call.

Owns the list of calls that can be drawn in this way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fmtprop.capture.pytorch import run_and_save_rng_state, run_with_rng_state
from fmtprop.errors import ImportModelError
from fmtprop.ops.host_call import draws_random_numbers
from fmtprop.ops.pytorch import OpOverload

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
    """Return dropout's factors: 0 with probability p < 1, else 1 / (1 - p), which keeps the mean."""
    # the generator's order is that of memory
    kept = torch.empty_like(src, dtype=torch.bool).bernoulli_(1 - p)
    return kept.to(src.dtype).mul_(1 / (1 - p))


def _filled(src: torch.Tensor, p: float) -> torch.Tensor:
    """Return `src`, new memory, with the numbers of ``src.bernoulli_(p)``: `bernoulli` has the order of the axes."""
    return src.bernoulli_(p)


def drawn_first(program: fx.GraphModule) -> fx.GraphModule:
    """Return the program with each dropout as a product with random numbers, which a separate call draws.

    `program`: the forward or the backward half of a step; it is not changed. The forward then saves the numbers of a
    dropout instead of its mask. For numbers that the backward draws again, it saves these instead of the generator's
    state.
    """
    graph, values = fx.Graph(), dict[fx.Node, Any]()
    for node in program.graph.nodes:
        values[node] = _rewritten(graph, values, node)
    return fx.GraphModule(program, graph)


def with_draws(program: fx.GraphModule) -> tuple[fx.GraphModule, list[Draw]]:
    """Return the program with a last argument for each call that draws, and the functions that draw these.

    Raises ImportModelError if numbers that are drawn depend on values of the model.
    """
    program, draws = drawn_first(program), list[Draw]()
    nodes = list(program.graph.nodes)
    computed = next(node for node in nodes if node.op != "placeholder")
    for node in nodes:
        if node.op != "call_function" or (draw := drawer(node)) is None:
            continue
        with program.graph.inserting_before(computed):
            given = program.graph.placeholder(f"drawn_{len(draws)}")
        given.meta = dict(node.meta)
        node.replace_all_uses_with(given)
        program.graph.erase_node(node)
        draws.append(draw)
    return program, draws


def _rewritten(graph: fx.Graph, values: Mapping[Any, Any], node: fx.Node) -> Any:
    """Add a node to the new graph; a tuple has the results of a call that is not a call there."""
    target, args = node.target, node.args
    if target is operator.getitem and isinstance(values[args[0]], tuple):
        return values[args[0]][args[1]]
    if target is run_with_rng_state:
        return _dropout(graph, values, args[2:], values[args[0]]) if _drops(args[1:]) else values[args[0]]
    if target is run_and_save_rng_state and _drops(args):
        dropped = _dropout(graph, values, args[1:])
        return dropped[1], dropped
    if target is run_and_save_rng_state:
        result = next(user for user in node.users if user.args[1] == 1)
        drawn = _call(graph, _drawn_by(args), fx.map_arg(args[1:], values.__getitem__), result, node.kwargs)
        return drawn, drawn
    if _drawn_by((target, *args)) is _filled:
        like: Any = args[0]
        return _call(graph, _filled, fx.map_arg(args, values.__getitem__), like)
    if _drops((target, *args)):
        return _dropout(graph, values, args)
    if target is _aten.native_dropout_backward.default:
        grad, noise = (values[argument] for argument in args[:2])
        noise.meta["val"] = node.meta["val"]
        return _call(graph, _aten.mul.Tensor, (grad, noise), node)
    return graph.node_copy(node, values.__getitem__)


def _drawn_by(call: tuple[Any, ...]) -> Any:
    """Return the function of a call that draws; PyTorch traces `bernoulli_` of new memory as `bernoulli`."""
    is_filled = call[0] is _aten.bernoulli.p and call[1].target is _aten.empty_like.default
    return _filled if is_filled else call[0]


def _drops(call: tuple[Any, ...]) -> bool:
    return call[0] is _aten.native_dropout.default and call[3] is not False


def _dropout(graph: fx.Graph, values: Mapping[Any, Any], args: tuple[Any, ...], noise: Any = None) -> Any:
    """Add a product with random numbers, which are drawn if they are not given; return it and the numbers."""
    src = values[args[0]]
    noise = _call(graph, _noise, (src, args[1]), args[0]) if noise is None else noise
    noise.meta["val"] = torch.empty_like(args[0].meta["val"])
    return _call(graph, _aten.mul.Tensor, (src, noise), args[0]), noise


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: Any = None) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    return node


def drawer(node: fx.Node) -> Draw | None:
    """Return a function that draws the numbers of a call; None if the call draws none."""
    if node.target not in (_noise, _filled):
        if not is_random(node):
            return None
        if str(node.target) not in _DRAWS:
            raise ImportModelError(
                f"{node.name}: {node.target} draws random numbers that depend on values of the model; use dropout, or "
                "draw them outside and pass them as an input"
            )
    target: Any = node.target
    args, kwargs = node.args, dict(node.kwargs)
    return lambda: target(*map(_stand_in, args), **kwargs)


def is_random(node: fx.Node) -> bool:
    """Return whether a call of an overload draws random numbers."""
    if not isinstance(node.target, OpOverload):
        return False
    names = (argument.name for argument in node.target._schema.arguments)
    return draws_random_numbers(node.target, {**dict(zip(names, node.args, strict=False)), **node.kwargs})


def _stand_in(argument: Any) -> Any:
    """Return an argument; a tensor is replaced by unwritten memory with the same strides."""
    if not isinstance(argument, fx.Node):
        return argument
    like = argument.meta["val"]
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
