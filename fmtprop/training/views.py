"""Results that are views of inputs or of other results: PyTorch makes them, behind a graph without them.

A caller may change a result in place, and sees the change in all views of it; AOTAutograd repeats a view of an input
with the strides and the offset of the result that it gets. Owns the division of a graph into its results with memory of
their own, and the views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fmtprop.capture.fx_import import base_of, placeholders, results_of, viewed
from fmtprop.ops.pytorch import OpOverload

_ATEN = torch.ops.aten

#: views of all elements, each once
_WHOLE = frozenset(
    getattr(_ATEN, name) for name in ("alias", "detach", "permute", "squeeze", "t", "transpose", "unsqueeze", "view")
)


class WithViews:
    """A graph that is run without its views, and the views; ready to be called by AOTAutograd, with a list of inputs.

    `run`: runs the graph without views. `views`: the views of its inputs and results, and all other results.
    """

    _boxed_call = True

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]], views: fx.GraphModule) -> None:
        self._run, self._views = run, views.forward

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph."""
        results: Sequence[Any] = self._views(*args, *self._run(args))
        return results


def without_views(module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Return a functional graph without the results that must be views, and a graph that makes them.

    Result: from inputs and these results to all results. None where there are no views of inputs, of a part of a
    result, or of a result that is returned in another form, too.
    """
    given = results_of(module)
    results = [one for one in given if isinstance(one, fx.Node)]
    shared = Counter(base_of(one) for one in dict.fromkeys(results))
    views = {one for one in results if _must_be_view(one, shared)}
    if not views:
        return module, None
    inner, outer = fx.Graph(), fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    inner.graph_copy(module.graph, copied)
    made = {node: outer.placeholder(node.name) for node in placeholders(module)}
    kept: dict[fx.Node, None] = dict.fromkeys(one for one in results if one not in views and one not in made)
    for one in views:
        kept.update(dict.fromkeys(_read_by_views(one)))
    made |= {node: outer.placeholder(node.name) for node in kept}
    for one in views:
        _copy_views(outer, one, made)
    inner.output(tuple(copied[node] for node in kept))
    outer.output([made[one] if isinstance(one, fx.Node) else one for one in given])
    inner.eliminate_dead_code()
    return fx.GraphModule(module, inner), fx.GraphModule(module, outer)


def _must_be_view(result: fx.Node, shared: Counter[fx.Node]) -> bool:
    """Return whether a result shares memory with an input or another result, or is a part of a larger tensor."""
    base, node = base_of(result), result
    if base is result:
        return False
    if base.op == "placeholder" or shared[base] > 1:
        return True
    while node is not base:
        if isinstance(node.target, OpOverload) and node.target.overloadpacket not in _WHOLE:
            return True
        node = node.all_input_nodes[0]
    return False


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _read_by_views(view: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that a view, its sizes and its views in between need, inputs left out."""
    for source in view.all_input_nodes:
        if viewed(source) is not None or (source.op == "call_function" and not _is_tensor(source)):
            yield from _read_by_views(source)
        elif source.op != "placeholder":
            yield source


def _copy_views(outer: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """Add a view, with all that it needs, to a graph."""
    if node not in made:
        sources = {source: _copy_views(outer, source, made) for source in node.all_input_nodes}
        made[node] = outer.node_copy(node, lambda source: sources[source])
    return made[node]
