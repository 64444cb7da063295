"""The graphs that ``torch.compile`` captures from a model, and the executor of each."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from fmtprop.dynamo.backend import options_of, regions_by
from fmtprop.dynamo.pytorch import config
from fmtprop.dynamo.pytorch import explain as explain_breaks
from fmtprop.dynamo.region import Ready, Region
from fmtprop.system.printable import counted


@dataclass(frozen=True)
class Explanation:
    """Result of ``torch.compile(model, backend="fmtprop")`` for a model."""

    #: each captured graph of ATen calls, and its executor
    regions: tuple[tuple[torch.fx.GraphModule, Ready], ...]
    #: reasons why the model is more than one graph
    breaks: tuple[str, ...]
    #: what `torch.compile` left to Python without a graph break, and how it would capture it; empty if nothing
    left: str = ""

    def __str__(self) -> str:
        lines = [f"{counted(len(self.regions), 'graph')}, {counted(len(self.breaks), 'graph break')}"]
        for number, (module, outcome) in enumerate(self.regions):
            calls = sum(node.op == "call_function" for node in module.graph.nodes)
            who = "fmtprop" if outcome.net is not None else "PyTorch"
            lines.append(f"graph {number}: {calls} calls, run by {who}: {outcome.reason}")
            lines += [f"  {count} x {where}" for where, count in _steps(outcome)]
        lines += [f"graph break {number}: {reason.splitlines()[0]}" for number, reason in enumerate(self.breaks)]
        lines += [self.left] if self.left else []
        return "\n".join(lines)


def explain(model: Any, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Return the captured graphs of a model, the executor of each with the reason, and ops without primitives.

    The model is called once, under ``torch.no_grad()``.

    Parameters
    ----------
    model : callable
        A module or a function for ``torch.compile``.
    *args, **kwargs
        Arguments of the call.
    options : dict, optional
        As in ``torch.compile(model, backend="fmtprop", options=...)``.

    Returns
    -------
    Explanation

    Examples
    --------
    >>> import torch, fmtprop as fp
    >>> print(fp.explain(torch.nn.Linear(64, 64), torch.ones(8, 64)))  # doctest: +ELLIPSIS
    1 graph, 0 graph breaks
    graph 0: 2 calls, run by ...
    """
    regions: list[Region] = []
    compiled: Any = torch.compile(model, backend=regions_by(options_of(None, options), regions.append))
    # torch.compile counts captures by code, and all modules of torch.nn share one code
    without_limit = config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize)
    with torch.no_grad(), without_limit:
        compiled(*args, **kwargs)
        breaks = explain_breaks(model)(*args, **kwargs).break_reasons
    found = tuple((region.module, outcome) for region in regions for outcome in region.outcomes)
    return Explanation(found, tuple(str(one.reason) for one in breaks), _left(model))


def _left(model: Any) -> str:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    kinds = sorted({type(one).__name__ for one in modules if isinstance(one, torch.nn.RNNBase)})
    if not kinds or config.allow_rnn:
        return ""
    return (
        f"torch.compile leaves modules that call nn.{' or nn.'.join(kinds)} to Python; "
        "torch._dynamo.config.allow_rnn = True before the first call lets it capture them"
    )


def _steps(outcome: Ready) -> list[tuple[str, int]]:
    if outcome.net is None:
        return []
    choices = ((node.op, node.choice) for node in outcome.net.graph.nodes())
    found = Counter(f"{op}, {choice.target} {choice.impl}" for op, choice in choices if choice is not None)
    return [(where, count) for where, count in found.most_common() if "view" not in where]
