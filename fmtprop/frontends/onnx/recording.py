"""Record of PyTorch's calls on tensors without data, as an fx graph.

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
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from fmtprop.errors import GraphError
from fmtprop.frontends.onnx.modes import CallMode
from fmtprop.ops.without_data import result_of

__all__ = ["Recording"]


class Recording(CallMode, ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that adds a node to a graph for every call that returns tensors.

    It sees the calls before PyTorch decomposes them. PyTorch allows only subclasses of this class to do so.

    Attributes
    ----------
    graph : torch.fx.Graph
        The calls so far. ``meta["val"]`` of a node is its result.
    constants : dict of torch.fx.Node to torch.Tensor
        Tensors with data that calls read.
    origin : tuple of str
        Path and type of the module that makes the present calls, for ``meta["nn_module_stack"]``.
    """

    def __init__(self) -> None:
        # not the parent's, which imports a compiler
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack = []
        self._dispatcher = ExitStack()
        self.graph = fx.Graph()
        self.constants: dict[fx.Node, torch.Tensor] = {}
        self.origin = ("", "")
        #: by a tensor's identity: the tensor, which keeps it, and its node, or a call with the result's index
        self._made: dict[Any, tuple[torch.Tensor, fx.Node | tuple[fx.Node, int]]] = {}

    def input(self, name: str, value: torch.Tensor) -> fx.Node:
        """Add a placeholder."""
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        self._made[_identity(value)] = value, node
        return node

    def node_of(self, value: torch.Tensor) -> fx.Node:
        """Return the node of a tensor; one for a constant is added."""
        found = self._made.get(_identity(value))
        if found is None and value.is_meta:
            raise GraphError(f"a tensor {tuple(value.shape)} without data, which no recorded call has made")
        if found is None:
            node = self.graph.get_attr(f"constant_{len(self.constants)}")
            node.meta["val"] = value
            self.constants[node] = value
        elif isinstance(found[1], fx.Node):
            return found[1]
        else:
            node = self._added(operator.getitem, found[1], {}, value)
        self._made[_identity(value)] = value, node
        return node

    def __enter__(self) -> Recording:
        self._dispatcher.enter_context(enable_python_dispatcher())  # C++ alone does not ask modes before decomposition
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._dispatcher.close()

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, and add its node."""
        kwargs = _on_cpu(kwargs)
        with no_python_dispatcher():
            result = result_of(func, args, kwargs)
        leaves = result if isinstance(result, list | tuple) else [result]
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            node = self._added(func, self._as_nodes(args), self._as_nodes(kwargs), result)
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    self._made[_identity(leaf)] = leaf, node if leaf is result else (node, index)
        return result

    def _added(self, target: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"], node.meta["nn_module_stack"] = value, {"onnx": self.origin}
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


def _identity(tensor: torch.Tensor) -> Any:
    """Return a key that two Python objects share if they are one tensor: PyTorch's factories copy their results."""
    if not tensor.is_meta:
        return id(tensor)
    place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return *place, tensor.is_conj(), tensor.is_neg()


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that makes a tensor where another one lies: the model's tensors are on the CPU."""
    return kwargs | {"device": torch.device("cpu")} if kwargs.get("device") == _META else kwargs


_META = torch.device("meta")
