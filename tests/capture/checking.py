"""Import a model, evaluate the graph by the ops' references, compare with the model itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fmtprop.capture import from_torch
from fmtprop.ir import Graph
from fmtprop.ir.structure import flatten_arguments, restructure
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops.evaluate import evaluate


def run(graph: Graph, *args: Any, **kwargs: Any) -> Any:
    """Call a graph as its model is called."""
    names = [node.name for node in graph.input_nodes]
    tensors = flatten_arguments(graph.structure, args, kwargs)
    return restructure(graph.structure, evaluate(graph, dict(zip(names, tensors, strict=True))))


class _Refuse(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())


def check(
    module: torch.nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    aten: int | None = 0,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> Graph:
    """Import and compare; `aten` is the expected number of nodes without an op, None for any."""
    args = args if isinstance(args, tuple) else (args,)
    kwargs = dict(kwargs or {})
    module.eval()
    # an importer that makes something of another type is a mistake, even though the import survives it
    handler = _Refuse()
    logging.getLogger("fmtprop").addHandler(handler)
    try:
        graph = from_torch(module, args, kwargs=kwargs)
    finally:
        logging.getLogger("fmtprop").removeHandler(handler)
    verify(graph, Stage.IMPORTED)
    with torch.no_grad():
        expected = module(*args, **kwargs)
    found = run(graph, *args, **kwargs)
    compare(found, expected, rtol, atol)
    if aten is not None:
        assert graph.count("aten") == aten, [n.attrs for n in graph.nodes() if n.op == "aten"]
    return graph


def compare(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Compare nested results: same structure, same types, same numbers."""
    theirs, spec = pytree.tree_flatten(expected)
    ours, our_spec = pytree.tree_flatten(found)
    assert type(found) is type(expected) or hasattr(found, "_fields"), (type(found), type(expected))
    assert our_spec.num_leaves == spec.num_leaves
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert a == b
