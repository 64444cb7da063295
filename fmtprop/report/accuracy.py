"""The error of each layer of one compiled model against another, such as an int8 plan against a float one.

Owns the rule by which steps of two plans are the same layer, and the figures. Runs the models as they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fmtprop.errors import InputError
from fmtprop.ir import Category, Node, linear_of, opdef
from fmtprop.ops import Eltwise, FakeQuantize, Lookup, Sum
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.ops.pytorch import tree_leaves
from fmtprop.report.files import WrittenAsJson
from fmtprop.report.sketch import computes_in, op_with_tail
from fmtprop.runtime.plan import Plan
from fmtprop.runtime.threads import current_threads

if TYPE_CHECKING:
    from fmtprop.ir.graph import Graph

#: functions of which a limit may cut the numbers below 0 off
_SIGNED = ("product", "add", "sub")

#: a step that only rounds or limits
_LIMIT = "limit"

#: layers of the table in a notebook: the least exact ones
_ROWS = 20


class Watched(Protocol):
    """The part of a compiled model that a comparison needs."""

    graph: Graph

    def prepare(self, threads: int) -> Plan:
        """Return the plan for a number of threads."""

    def watch(
        self, see: Callable[[Node, Callable[[], torch.Tensor | None]], None], *args: Any, **kwargs: Any
    ) -> list[torch.Tensor]:
        """Run once, and show each step's numbers."""


@dataclass(frozen=True)
class LayerError:
    """The error of one layer, or of one result of the model."""

    #: `name`, `other`: the steps of the two plans, or the name of the result
    name: str
    other: str
    #: `op`, `origin`: what the step computes, and where it is in the model
    op: str
    origin: str
    #: `computes_in`, `other_computes_in`: data type of the source that each step reads; empty for a result
    computes_in: str
    other_computes_in: str
    #: signal to quantization noise: the energy of the other's numbers over that of the differences, in dB. None if all
    #: are equal, or if it is no number.
    sqnr_db: float | None
    #: largest difference; None if it is no finite number
    max_error: float | None
    #: largest magnitude of the other's numbers; None if it is no finite number
    largest: float | None


@dataclass(frozen=True)
class LayerErrors(WrittenAsJson):
    """The error of each layer of a model against another one."""

    model: str
    other: str
    runs: int
    #: the layers that both have, in the order of execution
    layers: tuple[LayerError, ...]
    results: tuple[LayerError, ...]
    #: steps without a counterpart: the other plan computes them within other steps, or not at all
    alone: tuple[str, ...]

    @property
    def worst(self) -> tuple[LayerError, ...]:
        """The layers by their errors, the least exact first; those without error last."""
        return tuple(sorted(self.layers, key=_order))

    def to_text(self) -> str:
        """Return it as a table for a terminal, in the order of execution."""
        from fmtprop.report.text import table_text

        rows = [*map(_cells, self.layers), *map(_cells, self.results)]
        return table_text(self._caption(), _HEAD, rows) + "".join(f"{line}\n" for line in self._said())

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Return the results and the least exact layers for a notebook."""
        from fmtprop.report.html import fragment

        rows = [*map(_cells, self.results), *map(_cells, self.worst[:_ROWS])]
        return fragment(self._caption(), self._said(), _HEAD, rows)

    def _caption(self) -> str:
        inputs = "1 input" if self.runs == 1 else f"{self.runs} inputs"
        return f"{self.model} against {self.other}: {len(self.layers)} layers, {inputs}"

    def _said(self) -> list[str]:
        if not self.alone:
            return []
        names = ", ".join(self.alone)
        return [f"not compared, since the other plan has no such step (policy='propagate' joins none): {names}"]


_HEAD = ("step", "op", "in", "SQNR, dB", "max error", "largest", "from")


def _cells(row: LayerError) -> tuple[str, ...]:
    kinds = dict.fromkeys(kind for kind in (row.computes_in, row.other_computes_in) if kind)
    sqnr = f"{row.sqnr_db:.1f}" if row.sqnr_db is not None else "equal" if row.max_error == 0 else "no number"
    figures = ("no number" if figure is None else f"{figure:.3g}" for figure in (row.max_error, row.largest))
    return (row.name, row.op, " / ".join(kinds), sqnr, *figures, row.origin)


def _order(row: LayerError) -> float:
    if row.sqnr_db is not None:
        return row.sqnr_db
    return math.inf if row.max_error == 0 else -math.inf


# ---------------------------------------------------------------- the comparison


def compare(net: Watched, other: Any, data: Iterable[Any]) -> LayerErrors:
    """Run two models on the same inputs, and compare the layers that both have."""
    calls, mine = list(calls_of(data)), layers_of(net)
    pairs: list[tuple[Layer, Layer]] = []
    if is_plan := hasattr(other, "watch"):
        pairs = matched(mine, layers_of(other))
    elif not callable(other):
        raise InputError(
            f"compare needs a compiled model, or a function or module with the same results, got {type(other).__name__}"
        )
    layers, results = defaultdict[str, _Sums](_Sums), defaultdict[int, _Sums](_Sums)
    for args, kwargs in calls:
        numbers = dict[str, torch.Tensor]()
        if is_plan:
            expected = _shown([theirs for _, theirs in pairs], other, numbers.__setitem__, args, kwargs)
        else:
            with torch.no_grad():
                expected = [leaf for leaf in tree_leaves(other(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        wanted = {one.name: theirs.name for one, theirs in pairs if theirs.name in numbers}

        def add(name: str, found: torch.Tensor, wanted: Any = wanted, numbers: Any = numbers) -> None:
            if name in wanted:
                layers[name].add(found, numbers.pop(wanted[name]))

        found = _shown([one for one, _ in pairs], net, add, args, kwargs)
        _check(net.graph.name, found, expected)
        for index, both in enumerate(zip(found, expected, strict=True)):
            results[index].add(*both)
    outputs = [(node.name, results[index].figures()) for index, node in enumerate(net.graph.output_nodes)]
    return LayerErrors(
        net.graph.name,
        other.graph.name if is_plan else getattr(other, "__name__", type(other).__name__),
        len(calls),
        tuple(_row(*both, layers[both[0].name]) for both in pairs if both[0].name in layers),
        tuple(LayerError(name, name, "output", "", "", "", *figures) for name, figures in outputs),
        tuple(one.name for one in mine if one.name not in layers and _kind(one) != _LIMIT) if is_plan else (),
    )


def calls_of(data: Iterable[Any]) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Yield the arguments of each call: an item is a tensor, a sequence of arguments, or a mapping of named ones."""
    if isinstance(data, torch.Tensor | Mapping):
        data = [data]
    elif not isinstance(data, Iterable):
        raise InputError(f"data must be inputs, each what one call of the model takes, got {type(data).__name__}")
    count = 0
    for item in data:
        count += 1
        if isinstance(item, Mapping):
            yield (), item
        else:
            yield (tuple(item) if isinstance(item, tuple | list) else (item,)), {}
    if not count:
        raise InputError("data is empty: a comparison needs some typical inputs")


def _shown(
    layers: Sequence[Layer],
    net: Watched,
    see: Callable[[str, torch.Tensor], None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[torch.Tensor]:
    """Run a model, and show the numbers of some layers; return its results."""
    known = {layer.step.name: layer for layer in layers}

    def watched(node: Node, read: Callable[[], torch.Tensor | None]) -> None:
        layer = known.get(node.name)
        found = read() if layer is not None else None
        if layer is not None and found is not None:
            for view in layer.views:
                (found,) = evaluate_node(view, {"src": found})
            see(layer.name, found)

    return net.watch(watched, *args, **kwargs)


def _check(model: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    shapes, others = ([tuple(one.shape) for one in tensors] for tensors in (found, expected))
    if shapes != others:
        raise InputError(f"results of {model} have the shapes {shapes}, but those of the other model {others}")


def _row(mine: Layer, theirs: Layer, sums: _Sums) -> LayerError:
    read = computes_in(mine.step), computes_in(theirs.step)
    return LayerError(mine.name, theirs.name, op_with_tail(mine.step), mine.step.origin, *read, *sums.figures())


class _Sums:
    """The errors of one layer over all inputs."""

    def __init__(self) -> None:
        self.signal = self.noise = self.most = self.largest = 0.0

    def add(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        if not theirs.numel():
            return
        theirs = theirs.double()
        difference = mine.double() - theirs
        self.signal += theirs.square().sum().item()
        self.noise += difference.square().sum().item()
        # a comparison with NaN is false
        self.most, self.largest = (
            float(torch.maximum(torch.tensor(before).double(), tensor.abs().max()))
            for before, tensor in ((self.most, difference), (self.largest, theirs))
        )

    def figures(self) -> tuple[float | None, float | None, float | None]:
        """Return the ratio in dB, the largest error and the largest magnitude, each None if it is no finite number."""
        is_ratio = 0 < self.noise < math.inf and 0 < self.signal < math.inf
        ratio = 10 * math.log10(self.signal / self.noise) if is_ratio else None
        most, largest = (one if math.isfinite(one) else None for one in (self.most, self.largest))
        return ratio, most, largest


# ---------------------------------------------------------------- the same layer


@dataclass(frozen=True)
class Layer:
    """A step that computes a tensor of the model."""

    #: name of the node, which may run as several steps
    name: str
    step: Node
    views: tuple[Node, ...] = ()


def layers_of(net: Watched) -> list[Layer]:
    """Return the layers of a plan in the order of execution."""
    steps = {step.node.name: step.node for step in net.prepare(current_threads()).steps if step.results}
    found = []
    for node in steps.values():
        whole = node.name.rpartition(".")[0]
        is_part = whole in net.graph and net.graph.node(whole).origin == node.origin
        views = _views_to(net.graph, node, whole) if is_part and whole not in steps else ()
        if node.op != "reorder" and (views or not is_part):
            found.append(Layer(whole if views else node.name, node, views))
    return found


def _views_to(graph: Graph, node: Node, name: str) -> tuple[Node, ...]:
    """Return the views between a part of a node and its whole result; none where it is another part."""
    path = []
    view = graph.node(name)
    while view.name != node.name:
        if view.is_boundary or opdef(view.op).category is not Category.VIEW:
            return ()
        path.append(view)
        view = graph.node(graph.inputs(view.name)["src"].node)
    return tuple(reversed(path))


def matched(mine: Sequence[Layer], theirs: Sequence[Layer]) -> list[tuple[Layer, Layer]]:
    """Return the pairs of layers that compute the same tensor of the model, in the order of the first plan.

    The last function of a step, other than a limit (a rounding, a ReLU, a clip), has the same place in the model, the
    result has the same dims, and of sums and products, both or none are limited to numbers from 0 on. Of several layers
    in one place, those of the same name belong together, and the others in their order, if there are as many.
    """
    groups = defaultdict[tuple[object, ...], tuple[list[Layer], list[Layer]]](lambda: ([], []))
    for side, layers in enumerate((mine, theirs)):
        for layer in layers:
            groups[_place(layer)][side].append(layer)
    pairs: dict[str, tuple[Layer, Layer]] = {}
    for first, second in groups.values():
        names = {layer.name: layer for layer in second}
        same = [(layer, names[layer.name]) for layer in first if layer.name in names]
        done = {layer.name for layer, _ in same}
        left, right = ([layer for layer in side if layer.name not in done] for side in (first, second))
        rest = zip(left, right, strict=True) if len(left) == len(right) else ()
        pairs |= {one.name: (one, other) for one, other in (*same, *rest) if _are_alike(one, other)}
    return [pairs[layer.name] for layer in mine if layer.name in pairs]


def _place(layer: Layer) -> tuple[object, ...]:
    functions, is_positive = _functions(layer.step)
    dims = (layer.views[-1] if layer.views else layer.step).results[0].dims
    is_cut = is_positive and _kind(layer) in _SIGNED
    return functions[-1][1] or (layer.name, len(functions)), is_cut, dims


def _are_alike(one: Layer, other: Layer) -> bool:
    kinds = _kind(one), _kind(other)
    return kinds[0] == kinds[1] or None in kinds


def _kind(layer: Layer) -> str | None:
    """Return what the last function of a layer is; None for a table, which may be any."""
    functions, _ = _functions(layer.step)
    attrs, _ = functions[-1]
    if isinstance(attrs, Lookup):
        return None
    if _limits(attrs) is not None:
        return _LIMIT
    if isinstance(attrs, Sum):
        return "add"
    if len(functions) == 1 and linear_of(layer.step) is not None:
        return "product"
    return str(getattr(attrs, "alg", type(attrs).__name__))


def _functions(node: Node) -> tuple[list[tuple[object, str]], bool]:
    """Return what a step computes and where, without limits at the end, and whether these leave no number below 0."""
    found: list[tuple[object, str]] = [(node.attrs, node.origin), *((one.attrs, one.origin) for one in node.post_ops)]
    is_positive = False
    while True:
        low = _limits(found[-1][0])
        is_positive |= low is not None and low >= 0
        if low is None or len(found) == 1:
            return found, is_positive
        found.pop()


def _limits(attrs: object) -> float | None:
    """Return the least number that a function limits to, None for one that does more."""
    if isinstance(attrs, FakeQuantize):
        return attrs.low * attrs.scale
    if isinstance(attrs, Eltwise) and attrs.alg in ("relu", "clip"):
        return attrs.alpha if attrs.alg == "clip" else 0.0 if attrs.alpha == 0 else None
    return None
