"""A quantized model with some of its nodes in floats: as few as a bound on the error needs, or a table of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.from_graph import compile_graph
from fmtprop.compiling.options import Options
from fmtprop.compiling.sensitivity import Accuracy, QuantizedModel
from fmtprop.errors import OptionError
from fmtprop.ir.graph import Graph
from fmtprop.report.files import WrittenAsJson
from fmtprop.system.timing import Stopwatch

#: timed runs of each plan, in turns
_ROUNDS = 15


@dataclass(frozen=True)
class FloatNodes:
    """A model with some of its quantized nodes in floats."""

    #: the nodes in floats, the most sensitive first, as :func:`fmtprop.compile` takes them
    keep_float: tuple[str, ...]
    #: median time of a run, in turns with the others
    seconds: float
    #: signal to quantization noise of the plan's results; None if they are those of the model without roundings
    sqnr_db: float | None
    #: largest difference from the results of the model without roundings
    max_error: float
    #: whether no other row is faster with at most the same error
    is_best: bool


@dataclass(frozen=True)
class Tradeoff(WrittenAsJson):
    """Time against error: a quantized model with more and more of its nodes in floats."""

    model: str
    #: by the number of nodes in floats
    rows: tuple[FloatNodes, ...]

    def fastest(self, sqnr_db: float) -> FloatNodes:
        """Return the fastest row with at least a ratio."""
        rows = [row for row in self.rows if row.sqnr_db is None or row.sqnr_db >= sqnr_db]
        if not rows:
            raise OptionError(f"no row of {self.model} has {sqnr_db} dB; more nodes in floats (counts) are more exact")
        return min(rows, key=lambda row: row.seconds)

    def to_text(self) -> str:
        """Return it as a table for a terminal."""
        from fmtprop.report.text import table_text

        return table_text(self._caption, _HEAD, self._cells())

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Return it as a table for a notebook."""
        from fmtprop.report.html import fragment

        return fragment(self._caption, (), _HEAD, self._cells())

    @property
    def _caption(self) -> str:
        return f"{self.model}: time against error, with the most sensitive nodes in floats"

    def _cells(self) -> list[tuple[str, ...]]:
        cells, before = list[tuple[str, ...]](), 0
        for row in self.rows:
            more = row.keep_float[before:]
            before = len(row.keep_float)
            named = ", ".join(more[:_NAMED]) + (", …" if len(more) > _NAMED else "")
            ratio = "equal" if row.sqnr_db is None else f"{row.sqnr_db:.1f}"
            mark = "*" if row.is_best else ""
            cells.append((str(before), f"{row.seconds * 1e3:.3f}", ratio, f"{row.max_error:.3g}", mark, named))
        return cells


_HEAD = ("in floats", "ms", "SQNR, dB", "max error", "best", "more than the row before")

#: names of a row that a table shows
_NAMED = 4


def compile_within(graph: Graph, options: Options, accuracy: Accuracy) -> CompiledModel:
    """Return the model with as few nodes in floats as its plan's results need."""
    model = QuantizedModel(graph, accuracy.data, options)
    for count in range(model.fewest(accuracy.sqnr_db), len(model.order) + 1):
        net = compile_graph(graph, replace(options, keep_float=tuple(model.order[:count])))
        found = model.sqnr_db(_results(net, model))
        if found >= accuracy.sqnr_db:  # the plan's own rounding may be on the other side of a limit
            return net
    raise OptionError(
        f"{graph.name} has {found:.1f} dB with all nodes in floats: sqnr_db={accuracy.sqnr_db} is more than floats have"
    )


def tradeoff_of(graph: Graph, options: Options, data: Iterable[Any], counts: Sequence[int] | None = None) -> Tradeoff:
    """Return time and error with some numbers of nodes in floats.

    `counts`: default: 0, 1, 2, 4, … and all.
    """
    model = QuantizedModel(graph, data, options)
    most = len(model.order)
    counts = sorted({0, *(1 << power for power in range(most.bit_length())), most} if counts is None else set(counts))
    if not counts or counts[0] < 0 or counts[-1] > most:
        raise OptionError(f"counts must be numbers of nodes from 0 to {most}, got {counts}")
    plans = [tuple(model.order[:count]) for count in counts]
    nets = [compile_graph(graph, replace(options, keep_float=kept)) for kept in plans]
    inputs, times = list(model.inputs[0].values()), [list[float]() for _ in nets]
    with Stopwatch() as watch:
        for _ in range(_ROUNDS + 1):
            for net, taken in zip(nets, times, strict=True):
                taken.append(watch.time(lambda net=net: net.run_flat(inputs)))  # type: ignore[misc]
    figures = []
    for kept, net, taken in zip(plans, nets, times, strict=True):
        results = _results(net, model)
        figures.append((kept, median(taken[1:]), model.sqnr_db(results), model.max_error(results)))
    return Tradeoff(
        graph.name,
        tuple(
            FloatNodes(kept, seconds, ratio if math.isfinite(ratio) else None, most, _is_best(seconds, ratio, figures))
            for kept, seconds, ratio, most in figures
        ),
    )


def _is_best(seconds: float, ratio: float, rows: Sequence[tuple[Any, float, float, float]]) -> bool:
    return not any(
        other <= seconds and exact >= ratio and (other, exact) != (seconds, ratio) for _, other, exact, _ in rows
    )


def _results(net: CompiledModel, model: QuantizedModel) -> list[list[torch.Tensor]]:
    return [net.run_flat(list(one.values())) for one in model.inputs]
