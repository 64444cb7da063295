"""Record of PyTorch's calls on tensors without data, as nodes of fx.

``make_fx`` of PyTorch gives the same calls, but evaluates each twice and generates Python source. A model has hundreds
of nodes, and most of the time of loading it would go there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fmtprop.errors import GraphError
from fmtprop.frontends.onnx.modes import CallMode
from fmtprop.ops.without_data import result_of

__all__ = ["RecordedCalls", "Recording"]


class RecordedCalls:
    """Calls as nodes of fx, in order; an fx graph takes eight times as long to add one.

    Attributes
    ----------
    nodes : list of torch.fx.Node
        The calls.
    """

    def __init__(self) -> None:
        self.nodes: list[fx.Node] = []
        self._owner = fx.Graph()

    def add(self, op: str, name: str, target: Any, value: Any, args: Any = (), kwargs: Any = None) -> fx.Node:
        """Add a node with its result."""
        node = fx.Node(self._owner, name, op, target, args, kwargs or {})
        node.meta["val"] = value
        self.nodes.append(node)
        return node


class Recording(CallMode):  # type: ignore[no-untyped-call]
    """A mode that adds a node to a graph for every call that returns tensors.

    It sees the calls before PyTorch decomposes them: this is a part of autograd's dispatch, which the mode leaves out.

    Attributes
    ----------
    graph : RecordedCalls
        The calls so far. ``meta["val"]`` of a node is its result.
    constants : dict of torch.fx.Node to torch.Tensor
        Tensors with data that calls read.
    origin : tuple of str
        Path and type of the module that makes the present calls, for ``meta["nn_module_stack"]``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._below_autograd = ExitStack()
        self.graph = RecordedCalls()
        self.constants: dict[fx.Node, torch.Tensor] = {}
        self.origin = ("", "")
        #: by a tensor's identity: the tensor, which keeps it, and its node, or a call with the result's index
        self._made: dict[int, tuple[torch.Tensor, fx.Node | tuple[fx.Node, int]]] = {}

    def input(self, name: str, value: torch.Tensor) -> fx.Node:
        """Add a placeholder."""
        node = self.graph.add("placeholder", name, name, value)
        self._made[id(value)] = value, node
        return node

    def node_of(self, value: torch.Tensor) -> fx.Node:
        """Return the node of a tensor; one for a constant is added."""
        found = self._made.get(id(value))
        if found is None and value.is_meta:
            raise GraphError(f"a tensor {tuple(value.shape)} without data, which no recorded call has made")
        if found is None:
            name = f"constant_{len(self.constants)}"
            node = self.graph.add("get_attr", name, name, value)
            self.constants[node] = value
        elif isinstance(found[1], fx.Node):
            return found[1]
        else:
            node = self._added(operator.getitem, found[1], {}, value)
        self._made[id(value)] = value, node
        return node

    def __enter__(self) -> Recording:
        self._below_autograd.enter_context(torch._C._AutoDispatchBelowAutograd())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._below_autograd.close()

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, and add its node."""
        kwargs = _on_cpu(kwargs)
        result = result_of(func, args, kwargs)
        leaves = result if isinstance(result, list | tuple) else [result]
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            node = self._added(func, self._as_nodes(args), self._as_nodes(kwargs), result)
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    self._made[id(leaf)] = leaf, node if leaf is result else (node, index)
        return result

    def _added(self, target: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> fx.Node:
        name = f"{target.__name__.partition('.')[0]}_{len(self.graph.nodes)}"
        node = self.graph.add("call_function", name, target, value, args, kwargs)
        node.meta["nn_module_stack"] = {"onnx": self.origin}
        return node

    def _as_nodes(self, arguments: Any) -> Any:
        return map_aggregate(arguments, lambda at: self.node_of(at) if isinstance(at, torch.Tensor) else at)

    @contextmanager
    def within(self, path: str, kind: str) -> Iterator[None]:
        """Record this module as the origin of calls."""
        before, self.origin = self.origin, (path, kind)
        try:
            yield
        finally:
            self.origin = before


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that makes a tensor where another one lies: the model's tensors are on the CPU."""
    return kwargs | {"device": torch.device("cpu")} if kwargs.get("device") == _META else kwargs


_META = torch.device("meta")
