"""A captured graph that PyTorch saves: ``torch.compile(...).aot_compile(...)``, and its artefacts.

Owns what is in the bytes: the graph, which of its inputs are weights, the options, and what regions learned. As all
that PyTorch saves of compiled functions, they are a pickle: read them only from a source that you trust.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import fx

from fmtprop.capture.fx_import import placeholders
from fmtprop.dynamo import artifacts
from fmtprop.dynamo.pytorch import SerializableCallable, pickled, unpickled

_STATIC = "_dynamo_static_input_type"


class SavedGraph(SerializableCallable):
    """A captured graph, and the functions that run it, one for the shapes of each call.

    `graph`: the graph, without what was recorded about its nodes.
    """

    #: makes a graph ready to run: graph, arguments, mode and options; set by the backend, which imports this
    made: ClassVar[Callable[..., Callable[..., Any]]]

    def __init__(self, graph: bytes, static: tuple[int, ...], how: tuple[str | None, Mapping[str, Any]]) -> None:
        self.graph, self.static, self.how = graph, static, how
        self._runs: dict[object, Callable[..., Any]] = {}

    @classmethod
    def of(cls, module: fx.GraphModule, how: tuple[str | None, Mapping[str, Any]]) -> SavedGraph:
        """Return a captured graph."""
        inputs = enumerate(placeholders(module))
        static = tuple(i for i, node in inputs if node.meta.get("tensor_dict", {}).get(_STATIC))
        return cls(pickled(module), static, how)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; the first call with some shapes compiles it, with what an earlier process learned."""
        varying = (arg for i, arg in enumerate(args) if i not in self.static)
        key = tuple(tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in varying)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._compiled(args)
        return run(*args, **kwargs)

    def _compiled(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        module = unpickled(self.graph)
        module.meta["dynamo_compile_id"], module._param_name_to_source = None, {}
        for place, node in enumerate(placeholders(module)):
            node._dynamo_source = None
            if place in self.static:
                node.meta["tensor_dict"] = {_STATIC: "unguarded"}
        module.recompile()
        return SavedGraph.made(module, args, *self.how)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedGraph) -> bytes:
        """Return the bytes."""
        return pickle.dumps((fn.graph, fn.static, fn.how, artifacts.known()))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedGraph:
        """Return the graph of bytes from a trusted source."""
        graph, static, how, learned = pickle.loads(data)
        for key, content in learned.items():
            artifacts.keep(key, content)
        return cls(graph, static, how)
